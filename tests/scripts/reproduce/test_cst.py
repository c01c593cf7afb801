"""The benchmark of slice attention and the training of its models, at small sizes."""

import json
from dataclasses import replace

import pytest
import torch
import typer
from support.script_runs import rows_of, write_gzip

from scripts.benchmark import cst as benchmark_cst
from scripts.reproduce import cst as cst_training
from scripts.shared import data as shared_data


def test_layers_are_measured_and_kept(tmp_path):
    output = tmp_path / "results" / "cst.json"
    options = {"width": 32, "heads": 2, "slice_length": 8, "repeats": 1, "cosines": False, "output": output}
    benchmark_cst.main("64", **options)
    first = rows_of(output)
    assert [(row["part"], row["attention"]) for row in first] == [
        (part, name) for part in ("layer", "attention") for name in ("slices", "SDPA")
    ]
    for row in first:
        assert row["forward_ms"] > 0
        assert row["forward_backward_peak_bytes"] > row["forward_peak_bytes"] > 0
        assert row["attention"] == "slices" or row["forward_backward_speedup"] == 1
    benchmark_cst.main("64,104", **options)
    second = rows_of(output)
    assert second[:4] == first
    assert {row["length"] for row in second[4:]} == {104}


def test_the_layer_with_sdpa_is_the_same_layer():
    """One slice over the whole input and no global part: both give the same, with the same weights."""
    layer = benchmark_cst.CSTLayer(benchmark_cst.CSTConfig(hidden_size=32, num_attention_heads=2, slice_length=16))
    attention = layer.attention.double().eval()
    exact = benchmark_cst.ExactAttention(attention)
    hidden = torch.randn(1, 16, 32, dtype=torch.float64)
    local = attention._local(0, hidden, None, None)[0]
    torch.testing.assert_close(exact(hidden)[0], attention.output(local), rtol=0, atol=1e-15)


@pytest.mark.slow
def test_conversions_are_measured(real_model_folder, monkeypatch):
    monkeypatch.setattr(benchmark_cst, "SLICES", ((8, 1), (8, 3)))
    rows = benchmark_cst.measure_conversions({"length": 48}, 1)
    means = {(row["conversion"], row["extension_ratio"]): row["cosine_mean"] for row in rows}
    assert len(means) == 8
    assert (
        means["merged", 3] > means["merged", 1] > means["merged, attend_ends=False", 1] > means["the paper's sum", 1]
    )


@pytest.fixture
def small_tasks(tmp_path, monkeypatch):
    """Every task with a model and data so small that a step is a moment; the tests' folder of data sets."""
    folder = tmp_path / "data"
    monkeypatch.setenv(shared_data.VARIABLE, str(folder))
    monkeypatch.chdir(tmp_path)
    texts = [{"label": word, "text": f"a {word} film about {n}"} for n in range(8) for word in ("good", "bad")]
    for name in ("imdb", "20newsgroups"):
        for split in ("train", "test"):
            write_gzip(folder / name / f"{split}.jsonl.gz", "\n".join(map(json.dumps, texts)))
    for split in ("train", "valid"):
        write_gzip(folder / f"wikitext-2/wiki.{split}.tokens.gz", "the cat sat on the mat . " * 60)
    for name in ("pg1-train", "pg1661-held-out", "pg98-held-out"):
        write_gzip(folder / f"books/{name}.txt.gz", f"this is {name} . " * 100)
    for split in ("train", "dev"):
        lines = [f"a {row['label']} one\t{int(row['label'] == 'good')}" for row in texts]
        write_gzip(folder / f"glue/SST-2/{split}.tsv.gz", "\n".join(["sentence\tlabel", *lines]))
    for name, task in cst_training.TASKS.items():
        if task.batch is not None:
            sizes = task.sizes | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
            small = {"max_length": 32, "block_length": 32, "vocab_size": 270, "save_steps": 1}
            arguments = {key: small.get(key, value) for key, value in task.arguments.items()}
            sizes["max_position_embeddings"] = 32
            tiny = replace(task, sizes=sizes, arguments=arguments, batch=(2, 32, 270))
            monkeypatch.setitem(cst_training.TASKS, name, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("task", list(cst_training.TASKS))
def test_models_of_a_task_are_trained_and_kept(task, small_tasks, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "cst.json"
    names = list(cst_training.TASKS[task].models)[-2:]
    arguments = {"models": ";".join(names), "steps": 2, "output": output, "dtype": "float32"}
    cst_training.main(task, **arguments)
    rows = rows_of(output)
    assert [(row["task"], row["model"], row["steps"]) for row in rows] == [(task, name, 2) for name in names]
    metric = (
        "word_perplexity"
        if task.startswith(("WikiText", "Books"))
        else ("eval" if task == "SST-2" else "test") + "_accuracy"
    )
    assert all(row[metric] > 0 and row["parameters"] > 0 and row["train_seconds"] > 0 for row in rows)
    # The models of a task have other tables of positions: the settings arrived.
    assert len({row["parameters"] for row in rows}) == len(rows)
    monkeypatch.setattr(cst_training, "train", None)
    cst_training.main(task, **arguments)
    assert rows_of(output) == rows
    assert "written" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stopped_training_goes_on(small_tasks, tmp_path, monkeypatch):
    """The second step starts from the first one's checkpoint, not from the beginning."""
    arguments = {"models": "Transformer", "dtype": "float32"}
    cst_training.main("20 Newsgroups", **arguments, steps=2, output=tmp_path / "whole.json")
    run = next((tmp_path / "runs" / "cst").iterdir())
    assert run.name.startswith("20_Newsgroups_Transformer_seed_0-")
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    (run / "model.safetensors").unlink()
    seen = []
    original = cst_training.run_classification.RepeatableTrainer.training_step
    monkeypatch.setattr(
        cst_training.run_classification.RepeatableTrainer,
        "training_step",
        lambda self, *rest, **named: (seen.append(1), original(self, *rest, **named))[1],
    )
    cst_training.main("20 Newsgroups", **arguments, steps=2, output=tmp_path / "again.json")
    rows = [json.loads((tmp_path / name).read_text())["rows"][0] for name in ("whole.json", "again.json")]
    assert state["global_step"] == 2
    assert not seen
    assert rows[0]["test_loss"] == pytest.approx(rows[1]["test_loss"], abs=1e-6)


def test_held_out_books_are_not_trained_on(small_tasks):
    arguments = cst_training.files_of(cst_training.TASKS["Books, 256 tokens"])
    middle = arguments.index("--validation_files")
    assert [path.rpartition("/")[2] for path in arguments[1:middle]] == ["pg1-train.txt.gz"]
    assert [path.rpartition("/")[2] for path in arguments[middle + 1 :]] == [
        "pg1661-held-out.txt.gz",
        "pg98-held-out.txt.gz",
    ]


@pytest.mark.slow
def test_costs_of_a_step(small_tasks, tmp_path):
    output = tmp_path / "cst.json"
    for _ in range(2):  # measured once
        cst_training.main("IMDb bytes", costs=True, repeats=1, dtype="float32", output=output)
    rows = rows_of(output)
    assert [row["model"] for row in rows] == list(cst_training.TASKS["IMDb bytes"].models)
    assert rows[0]["speedup"] == 1
    assert all(row["step_ms"] > 0 and row["step_peak_bytes"] > 0 for row in rows)
    with pytest.raises(typer.BadParameter, match="depends on the lengths of its texts"):
        cst_training.main("SST-2", costs=True, dtype="float32", output=output)


def test_unknown_tasks_and_models_are_named():
    with pytest.raises(typer.BadParameter, match="unknown task 'MNLI'"):
        cst_training.main("MNLI")
    with pytest.raises(typer.BadParameter, match="unknown models"):
        cst_training.main("SST-2", models="BERT;GPT-3")
