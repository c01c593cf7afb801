"""The table of clustered attention in fine-tuned models, on a small model and a few rows of two tasks."""

import gzip
import json

import approximate
import pytest
import shared_data
import training
import typer
from transformers import AutoConfig, AutoModel

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


@pytest.mark.parametrize("task", ["sst2", "squad"])
def test_a_model_is_fine_tuned_and_approximated(task, base, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "approximation.json"
    options = {"base": base, "methods": "clustered-2;i-clustered-2-99", "seeds": "0,1", "local": True}
    options |= {"runs": tmp_path / "runs", "output": output}
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
    assert str(approximate.TASKS[task].paper["clustered-25"]) not in printed  # the paper has no row of two clusters
    path = approximate.fine_tuned(task, base, options["runs"], 0, local=True)
    share, nothing = approximate.attention_errors(task, path, "clustered-999", 0, local=True).values()
    assert (share, nothing) == (0, None)
    monkeypatch.setattr(approximate, "evaluate", None)
    approximate.main(task, **options)
    assert json.loads(output.read_text())["rows"] == rows


def test_mistakes_are_told_before_anything_runs(monkeypatch):
    monkeypatch.setattr(approximate, "fine_tuned", None)
    with pytest.raises(typer.BadParameter, match="rows are named"):
        approximate.main("cola", methods="clustered-25-32")
    with pytest.raises(typer.BadParameter, match="tasks are cola"):
        approximate.main("cola,imdb")
    with pytest.raises(typer.BadParameter, match="one of them where a model is named"):
        approximate.main("cola,mrpc", model="runs/cola")
