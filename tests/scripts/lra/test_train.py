"""The script of the Long Range Arena runs every task, with the paper's values where none are named."""

import json
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import typer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_effattn import CSTForPairClassification
from scripts.lra import sources
from scripts.lra import train as run_lra
from scripts.reproduce import lra as lra_table

RUN = "--do_train --do_eval --do_predict --use_cpu --report_to none --max_steps 3".split()  # noqa: SIM905
RUN += "--per_device_train_batch_size 8 --per_device_eval_batch_size 16 --learning_rate 1e-3".split()  # noqa: SIM905
TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
SMALL = {
    "bert": TINY,
    "cst": TINY + ",slice_length=4",
    "clusterformer": TINY + ",clusters=2",
    "full": TINY + ",composition=full,position_embedding=absolute",
    "fnet": "hidden_size=16,num_hidden_layers=1,intermediate_size=16",
}
COUNTS = "train_size=24,validation_size=8,test_size=8"
SETTINGS = {"listops": COUNTS + ",min_length=5,max_length=30", "pathfinder": COUNTS + ",contour_length=4"}


@pytest.fixture
def folder(request, tmp_path):
    """Files of the tasks that are made of existing data."""
    texts = [("good " * 5, 1), ("bad " * 6, 0)] * 4
    for split in ("train", "test"):
        rows = (json.dumps({"text": text, "label": label}) for text, label in texts)
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
        for number, name in enumerate(sources.CIFAR10_CLASSES):
            (tmp_path / split / name).mkdir(parents=True)
            PIL.Image.new("RGB", (32, 32), (20 * number,) * 3).save(tmp_path / split / name / "0.png")
    for split in ("train", "eval", "test"):
        rows = (f"{label}.0\ta\tb\t{text}\t{text[::-1]}" for text, label in texts)
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("\n".join(rows))
    return tmp_path


@pytest.mark.slow_except("retrieval-full", "pathfinder-cst")
@pytest.mark.parametrize(
    ("task", "kind"),
    [
        *(("listops", kind) for kind in SMALL),
        ("text", "cst"),
        *(("retrieval", kind) for kind in SMALL),
        ("image", "clusterformer"),
        ("pathfinder", "cst"),
    ],
)
def test_every_task_and_kind_of_model(task, kind, folder):
    command = [*RUN, "--task", task, "--model_type", "cst" if kind == "full" else kind]
    command += ["--config_overrides", SMALL[kind], "--output_dir", str(folder / "run"), "--cache_dir", str(folder)]
    if task in SETTINGS:
        command += ["--data_settings", SETTINGS[task]]
    else:
        command += ["--data_path", str(folder)]
    metrics = run_lra.main(command)
    assert np.isfinite([metrics["train_loss"], metrics["eval_loss"], metrics["test_loss"]]).all()
    assert 0 <= metrics["test_accuracy"] <= 1
    kept = json.loads((folder / "run" / "all_results.json").read_text())
    assert kept["test_accuracy"] == metrics["test_accuracy"]
    two_towers = task == "retrieval" and kind in ("cst", "full")
    auto_class = CSTForPairClassification if two_towers else AutoModelForSequenceClassification
    config = auto_class.from_pretrained(folder / "run").config
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(folder / "run"))
    longest = {"listops": 2000, "text": 4096, "retrieval": 4096 if two_towers else 8193}.get(task, 1024)
    assert config.max_position_embeddings == longest


@pytest.mark.slow
def test_a_model_learns_to_tell_words_apart(folder):
    """And a checkpoint is gone on with: its own sizes, the task's classes."""
    command = [*RUN, "--task", "text", "--data_path", str(folder), "--cache_dir", str(folder), "--max_length", "32"]
    fresh = ["--model_type", "cst", "--config_overrides", SMALL["cst"], "--output_dir", str(folder / "run")]
    metrics = run_lra.main([*command, *fresh, "--max_steps", "40", "--learning_rate", "1e-2", "--warmup_steps", "0"])
    assert metrics["test_accuracy"] == 1.0
    again = ["--model_name_or_path", str(folder / "run"), "--output_dir", str(folder / "again")]
    assert run_lra.main([*command, *again, "--learning_rate", "0"])["test_accuracy"] == 1.0


@pytest.mark.slow
def test_no_model_is_chosen_by_the_test_set(folder):
    """That of Text is its validation set too, unless texts are held out."""
    command = [*RUN, "--task", "text", "--data_path", str(folder), "--cache_dir", str(folder), "--max_length", "32"]
    command += ["--model_type", "cst", "--config_overrides", SMALL["cst"], "--output_dir", str(folder / "run")]
    best = ["--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1", "--load_best_model_at_end"]
    with pytest.raises(ValueError, match=r"validation set of text is its test set.*validation_share=0\.1"):
        run_lra.main([*command, *best])
    assert not (folder / "run").exists()
    metrics = run_lra.main([*command, *best, "--data_settings", "validation_share=0.25"])
    assert 0 <= metrics["test_accuracy"] <= 1
    assert not run_lra.validates_on_test("listops", {})


def test_defaults_are_those_of_the_paper_and_can_be_overridden(tmp_path):
    """Lee 2023, Table 6."""
    rows = {
        "listops": (2000, 32, 1e-5, 1000, 20_000),
        "text": (4096, 32, 2e-5, 8000, 20_000),
        "retrieval": (4096, 32, 5e-5, 800, 30_000),
        "image": (1024, 256, 2e-4, 175, 35_000),
        "pathfinder": (1024, 256, 1e-4, 312, 62_000),
    }
    for task, row in rows.items():
        _, data, training = run_lra.parse(["--task", task, "--output_dir", str(tmp_path)])
        batch_size, steps = training.per_device_train_batch_size, training.max_steps
        assert (data.max_length, batch_size, training.learning_rate, training.warmup_steps, steps) == row
    named = ["--max_steps", "7", "--learning_rate", "3e-4", "--max_length", "99", "--warmup_steps", "2"]
    _, data, training = run_lra.parse(["--task", "image", "--output_dir", str(tmp_path), *named])
    numbers = (data.max_length, training.max_steps, training.learning_rate, training.warmup_steps)
    assert numbers == (99, 7, 3e-4, 2)
    assert training.per_device_train_batch_size == 256
    assert run_lra.model_settings(run_lra.ModelArguments(model_type="cst"), 1024)["hidden_size"] == 256


def test_a_command_line_that_cannot_be(capsys, folder):
    with pytest.raises(SystemExit):
        run_lra.main(["--task", "sorting", "--output_dir", str(folder / "run")])
    assert "invalid choice: 'sorting'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there are checksums of listops, pathfinder, not of 'text'"):
        run_lra.main(
            [
                *("--task", "text", "--data_path", str(folder), "--cache_dir", str(folder), "--verify_data"),
                *("--output_dir", str(folder / "run")),
            ]
        )
    assert not (folder / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_the_table_of_all_models(task, tmp_path, monkeypatch, capsys):
    """Every row of it, on a few short inputs; what is kept is not run again."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(run_lra, "SIZES", sizes)
    short = replace(run_lra.DEFAULTS[task], max_length=32, max_steps=20_000)
    monkeypatch.setitem(run_lra.DEFAULTS, task, short)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    options = {"tasks": task, "share": 0.0001, "batch_size": 8, "dtype": "float32", "samples": 8}
    options |= {"data_settings": SETTINGS[task], "runs": tmp_path / "runs", "output": tmp_path / "lra.json"}
    lra_table.main(**options)
    rows = json.loads((tmp_path / "lra.json").read_text())["rows"]
    assert [row["model"] for row in rows] == list(lra_table.MODELS)
    assert {row["steps"] for row in rows} == {2}
    assert len({row["parameters"] for row in rows}) >= 4
    assert all(row["train_seconds"] > 0 for row in rows)
    assert str(lra_table.PAPER["Transformer"][task]) in capsys.readouterr().out
    single = {"models": "CST L=8", "output": tmp_path / "other.json"}
    lra_table.main(**options | single | {"learning_rate": 0.1})
    other = json.loads((tmp_path / "other.json").read_text())["rows"][0]
    assert other["test_loss"] != rows[1]["test_loss"]  # trained anew, not the first one's checkpoint
    monkeypatch.setattr(lra_table, "train", None)
    lra_table.main(**options)
    assert json.loads((tmp_path / "lra.json").read_text())["rows"] == rows
    with pytest.raises(typer.BadParameter, match="unknown tasks"):
        lra_table.main(tasks="chess")
