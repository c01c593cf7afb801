"""The README says what the kept results say, and its code runs."""

import importlib
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from support.embedding_cases import save_encoder
from support.embedding_cases import text as words
from support.tiny_models import batch_for, tiny_model
from transformers import AutoModel, AutoTokenizer

import hf_effattn
from hf_effattn.cli import app
from hf_effattn.patching.methods import make_method
from hf_effattn.patching.model_types.table import ModelType
from hf_effattn.settings_parsing import method_of
from hf_effattn.training import arguments as training_arguments
from scripts.publish import cst_tables
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
    result = json.loads((cst_tables.RESULTS / "benchmark_other_methods.json").read_text(encoding="utf-8"))
    best = update_readme.fastest(result["rows"]).query("speedup >= 1.2")
    assert len(best) > 10
    for row in best.itertuples():
        assert make_method(**method_of(row.setting)).shortest_length("cpu") <= row.length, row.setting
    for _, of_length in best.sort_values("target").groupby("length"):  # a looser bound is never slower
        assert of_length["speedup"].is_monotonic_increasing


ROOT = README.parent
TEXTS = sorted([README, *ROOT.glob("*/README.md"), *ROOT.glob("hf_effattn/*/*.md"), *ROOT.glob("model_cards/*.md")])


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """Pictures, files and the headings in them."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"^\[\w+\]: (?!https?:)([^#\n]*)#?(.*)", text, re.MULTILINE)
    pictures = re.findall(r'src(?:set)?="([^"#]*)()"', text)
    for target, heading in [*re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text), *named, *pictures]:
        other = path.parent / target if target else path
        assert other.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}, heading


def test_commands_exist():
    makefiles = [ROOT / "Makefile", *ROOT.glob("scripts/*/*.mk")]
    rules = "\n" + "\n".join(path.read_text(encoding="utf-8") for path in makefiles)
    text = "\n".join(path.read_text(encoding="utf-8") for path in TEXTS)
    named = re.findall(r"(?:`|\n)make ([\w-]+)(?!…)\b(?![-…])", text)
    for target in named:
        assert f"\n{target}:" in rules, target
    trained = re.search(r"^TABLES := ((?:.*\\\n)*.*)", rules, re.MULTILINE)[1].replace("\\\n", "").split()
    assert len(trained) > 5
    assert set(trained) <= set(named)
    for script in re.findall(r"python -m (scripts[.\w]+)", text):
        assert (ROOT / f"{script.replace('.', '/')}.py").is_file(), script


# The most words of a page that is written by hand; but in the README, generated tables are left out.
WORDS = {
    "README.md": 1100,
    "CHANGELOG.md": 500,
    "hf_effattn/README.md": 1450,
    "hf_effattn/embedding/README.md": 450,
    "hf_effattn/models/README.md": 600,
    "hf_effattn/ops/DERIVATIONS.md": 600,
    "hf_effattn/ops/README.md": 1000,
    "hf_effattn/patching/README.md": 2600,
    "model_cards/LONG_DOCUMENTS.md": 1000,
    "model_cards/RELIABILITY.md": 1200,
    "model_cards/RESULTS.md": 1700,
    "scripts/README.md": 900,
    "tests/README.md": 500,
}


@pytest.mark.parametrize("page", WORDS)
def test_pages_are_short_and_so_are_the_cells_of_their_tables(page):
    """Words and cells, beside lines, which get denser where nothing else is counted."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= {"README.md": 150, "hf_effattn/patching/README.md": 250}.get(page, 500)
    if page != "README.md":
        text = re.sub(r"<!-- table: .*?<!-- end of table -->", "", text, flags=re.DOTALL)
    assert len(text.split()) <= WORDS[page]
    cells = [cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells), default=0) <= 120


def test_the_readme_says_from_where_a_patch_works():
    text = README.read_text(encoding="utf-8")
    shortest = make_method("bi-clustered").shortest_length("cpu")
    assert f"starts at {shortest:,} tokens on a CPU" in " ".join(text.split())
    (on_a_gpu,) = re.findall(r"^\| a GPU \|.*", text, re.MULTILINE)
    for method in ("i-clustered", "bi-clustered"):
        shortest = make_method(method).shortest_length("cuda")
        assert re.search(rf'{shortest:,}[^"]* by `"{method}"`', on_a_gpu)


def test_the_quick_start_runs(real_model_folder, tmp_path, monkeypatch, capsys):
    """As printed, with the local model in place of its name on the Hub, its positions extended, and less text."""
    text = README.read_text(encoding="utf-8")
    code = re.search(r"## Quick start\n.*?```python\n(.*?)```", text, re.DOTALL)[1]
    printed = re.search(r"The report prints, .*?```\n(.*?)```", text, re.DOTALL)[1]
    model = hf_effattn.extend_positions(AutoModel.from_pretrained(real_model_folder), 640)
    model.save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(real_model_folder).save_pretrained(tmp_path / "encoder")
    code = code.replace('"BAAI/bge-m3"', repr(str(tmp_path / "encoder"))).replace("8192", "640")
    forced = code.replace(
        'patch_attention(model, "bi-clustered")', 'patch_attention(model, "bi-clustered", min_length=0)'
    )
    assert forced != code
    (tmp_path / "long.txt").write_text("It was the best of times, it was the worst of times. " * 80, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(forced, names)
    assert names["outputs"].last_hidden_state.shape == (1, 640, 384)
    assert names["model"].config._attn_implementation == "sdpa"
    starts = ("BertModel (6 attention layers", "- bi-clustered clusters=32 topk=64 key_clusters=32: the attention")
    for text in (printed, capsys.readouterr().out):
        assert all(start in " ".join(text.split()) for start in starts)


@pytest.mark.slow
def test_the_lines_that_train_an_embedder_run(tmp_path, monkeypatch):
    """As printed, with a tiny local model in place of its name on the Hub and less text."""
    page = (ROOT / "model_cards" / "LONG_DOCUMENTS.md").read_text(encoding="utf-8")
    code = re.search(r"## Train an embedder.*?```python\n(.*?)```", page, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line]) <= 10
    name = save_encoder(tmp_path / "encoder", positions=640)
    candidates = [method_of("bi-clustered clusters=8 topk=16 key_clusters=8 min_length=0")]
    for printed, small in {
        '"sentence-transformers/all-MiniLM-L6-v2"': repr(str(name)),
        "8192": "700",
        "max_error=0.1": f"max_error=2.0, candidates={candidates}",
        '"layer"': '"head"',  # of layers the times decide: texts as short as these are faster exactly
    }.items():
        assert code.count(printed) == 1
        code = code.replace(printed, small)
    monkeypatch.chdir(tmp_path)
    texts = [words(660, seed=seed) for seed in range(3)]
    pairs = Dataset.from_dict({"anchor": [words(5, seed=seed) for seed in range(3)], "positive": texts})
    names: dict = {"texts": texts, "pairs": pairs}
    exec(code, names)
    model = names["model"]
    assert names["settings"].settings.heads == ((0, 0), (0, 0))
    assert model[0].auto_model.config._attn_implementation == "per-head"
    assert model.max_seq_length == 700
    before = SentenceTransformer(str(name))
    assert not np.allclose(model.encode(texts[0]), before.encode(texts[0]), atol=1e-4)


@torch.no_grad()
def test_the_lines_for_int8_layers_run():
    """As printed; what ends a feed-forward block stays as it is."""
    page = (ROOT / "hf_effattn" / "patching" / "MEASUREMENTS.md").read_text(encoding="utf-8")
    code = re.search(r"## Int8 linear layers.*?```python\n(.*?)```", page, re.DOTALL)[1]
    small = '"bi-clustered", min_length=0, clusters=8, topk=8, key_clusters=8)'
    model = tiny_model("bert")
    inputs, names = batch_for(model).inputs, {"hf_effattn": hf_effattn, "model": model}
    exact = model(**inputs).last_hidden_state
    exec(code.replace('"bi-clustered")', small), names)
    left = [name for name, layer in names["model"].named_modules() if type(layer) is torch.nn.Linear]
    assert left == [f"encoder.layer.{layer}.output.dense" for layer in range(3)]
    change = (names["model"](**inputs).last_hidden_state - exact).norm() / exact.norm()
    assert 1e-4 < change < 0.3
    assert names["model"].config._attn_implementation == "bi-clustered"


def test_the_commands_in_the_texts_name_options_that_there_are():
    """Those of `effattn`: their names and options, without running them."""
    group = typer.main.get_command(app)
    commands = 0
    for path in TEXTS:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if not line.startswith("effattn "):
                    continue
                _, name, *arguments = shlex.split(line, comments=True)
                known = {option for parameter in group.commands[name].params for option in parameter.opts}
                assert {argument for argument in arguments if argument.startswith("--")} <= known, line
                commands += 1
    assert commands > 8


def test_the_fields_of_a_model_type_are_in_the_table_of_the_guide_to_adding_one():
    text = (ROOT / "hf_effattn" / "README.md").read_text(encoding="utf-8")
    table = text.partition("| field of `ModelType` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [field.name for field in fields(ModelType)]


def test_the_model_from_scratch_is_made_as_printed():
    text = README.read_text(encoding="utf-8").split("## Train from scratch")[1]
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert names["model"].config.slice_length == 16
    assert names["model"](torch.arange(1, 65)[None]).logits.shape == (1, 2)


MODULES = {"scripts/train/": "scripts.train.", "-m scripts.lra.": "scripts.lra."}


def training_commands():
    """The lines of the scripts' README that start a training script: its module, and the rest of the line."""
    text = (README.parent / "scripts" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [
        (module + command.split()[0].removesuffix(".py"), command.partition(" ")[2])
        for line in text.splitlines()
        for start, module in MODULES.items()
        if (command := line.removeprefix(f"python {start}")) != line
    ]


@pytest.mark.parametrize(("module", "arguments"), training_commands(), ids=lambda text: text.split(".")[-1][:20])
def test_commands_for_the_training_scripts_are_understood(module, arguments, monkeypatch, tmp_path):
    """Up to where the script has read its arguments; there is no Hub here to go on with."""
    script = importlib.import_module(module)
    monkeypatch.chdir(tmp_path)

    class UnderstoodError(Exception):
        pass

    def stop(seed):
        raise UnderstoodError

    seeding = script if hasattr(script, "set_seed") else training_arguments
    monkeypatch.setattr(seeding, "set_seed", stop)
    with pytest.raises(UnderstoodError):
        script.main(shlex.split(arguments))


def test_every_training_script_has_its_command_in_the_readme():
    scripts = {f"scripts.train.{path.stem}" for path in (README.parent / "scripts" / "train").glob("*.py")}
    assert scripts | {"scripts.lra.train"} == {module for module, _ in training_commands()}
