"""The README says what the kept results say, and its code runs."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
import torch

from hf_effattn.patching.methods import make_method
from scripts.benchmark import frontier as benchmark_frontier
from scripts.publish import readme as update_readme

README = Path(__file__).resolve().parents[3] / "README.md"


@pytest.mark.parametrize("path", update_readme.TEXTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_text_is_made_of_the_results_byte_for_byte(path):
    assert update_readme.TEXTS[path]().encode() == path.read_bytes(), "run: python -m scripts.publish.readme"


def test_every_model_card_is_among_them():
    cards = set((README.parent / "model_cards").glob("*/README.md"))
    assert cards == {path for path in update_readme.TEXTS if path.parent.parent.name == "model_cards"}


def test_a_patched_model_runs_the_settings_that_the_guide_recommends():
    """At the lengths they are recommended for: below its min_length a method does not run."""
    result = json.loads((update_readme.RESULTS / "benchmark_frontier.json").read_text(encoding="utf-8"))
    tried = {row["name"]: row for row in result["rows"]}
    checked = 0
    for _, row in benchmark_frontier.least_times(result["rows"]).iterrows():
        for method in ("i-clustered", "bi-clustered"):
            name = row[f"{method} setting"]
            if pd.isna(name) or row[f"{method}: times faster"] < 1.2:
                continue
            fields = ("clusters", "topk", "key_clusters")
            counts = {field: tried[name][field] for field in fields if tried[name][field] is not None}
            assert make_method(method, **counts).shortest_length("cpu") <= row["length"], name
            checked += 1
    assert checked > 5


def test_pictures_and_commands_exist():
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (README.parent / target).is_file(), target
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    text += (README.parent / "model_cards" / "RESULTS.md").read_text(encoding="utf-8")
    named = re.findall(r"(?:`|\n)make ([\w-]+)", text)
    for target in named:
        assert f"\n{target}:" in makefile, target
    trained = re.search(r"^TABLES := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)[1].replace("\\\n", "").split()
    assert len(trained) > 5
    assert set(trained) <= set(named)


def test_the_ten_lines_run(real_model_folder, tmp_path, monkeypatch):
    """As printed, with the local model's folder in place of its name on the Hub and less text."""
    code = re.search(r"## Ten lines\n\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    code = code.replace('"sentence-transformers/all-MiniLM-L6-v2"', repr(str(real_model_folder)))
    forced = 'patch_attention(model, "i-clustered", min_length=0,'
    code = code.replace("8192", "640").replace('patch_attention(model, "i-clustered",', forced)
    assert forced in code
    (tmp_path / "long.txt").write_text("It was the best of times, it was the worst of times. " * 80, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    assert names["embedding"].shape == (1, 384)
    assert torch.isfinite(names["embedding"]).all()


def test_the_model_from_scratch_is_made_as_printed():
    text = README.read_text(encoding="utf-8").split("## Models from scratch")[1]
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert names["model"].config.slice_length == 16
    assert names["model"](torch.arange(1, 65)[None]).logits.shape == (1, 2)


def training_commands():
    """The lines of the README that start a training script, without `python scripts/train/`."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    start = "python scripts/train/"
    return [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("command", training_commands(), ids=lambda command: command.split()[0])
def test_commands_for_the_training_scripts_are_understood(command, monkeypatch, tmp_path):
    """Up to where the script has read its arguments; there is no Hub here to go on with."""
    script, *arguments = shlex.split(command)
    module = importlib.import_module(f"scripts.train.{script.removesuffix('.py')}")
    monkeypatch.chdir(tmp_path)

    class UnderstoodError(Exception):
        pass

    def stop(seed):
        raise UnderstoodError

    monkeypatch.setattr(module, "set_seed", stop)
    with pytest.raises(UnderstoodError):
        module.main(arguments)


def test_every_training_script_has_its_command_in_the_readme():
    scripts = {path.name for path in (README.parent / "scripts" / "train").glob("*.py")}
    assert scripts == {command.split()[0] for command in training_commands()}
