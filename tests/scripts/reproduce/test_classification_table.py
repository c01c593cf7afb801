"""The table of text classification: its data, its sweeps, and that it goes on where it stopped."""

import json

import pytest
import typer
from support.script_runs import rows_of, write_gzip

from hf_effattn import ClusterFormerConfig
from scripts.reproduce import answer_ranking, classification_data
from scripts.reproduce import classification as classification_table


def write_texts(folder):
    """Two classes that differ in one word, as CR and 20 Newsgroups; pairs that are the same or not, as WikiQA."""
    for name, word in (("neg", "poor"), ("pos", "fine")):
        lines = [f"a {word} story of {place} things" for place in range(40)]
        write_gzip(folder / f"sentcls/custrev.{name}.gz", "\n".join([*lines, "", " "]).encode())
    for split in ("train", "test"):
        messages = [
            {"id": str(place), "label": label, "text": f"Subject: {label} of {place}\n\nabout {label}"}
            for place in range(20)
            for label in ("sci.space", "rec.autos")
        ]
        write_gzip(folder / f"20newsgroups/{split}.jsonl.gz", "\n".join(map(json.dumps, messages)).encode())
        pairs = [f"{a} sat\t{b} sat\t{int(a == b)}" for a in ("a cat", "a dog") for b in ("a cat", "a dog")] * 8
        write_gzip(folder / f"matching/wikiqa/{split}.txt.gz", "\n".join(pairs).encode())


@pytest.fixture
def small_tables(data_folder, monkeypatch):
    write_texts(data_folder)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setattr(classification_table, "SIZES", classification_table.SIZES | small)
    monkeypatch.setitem(classification_data.OF_PAIRS, "num_attention_heads", 2)
    quick = {"vocab_size": 300, "learning_rate": 1e-2, "per_device_train_batch_size": 8}
    monkeypatch.setattr(classification_table, "TRAINING", classification_table.TRAINING | quick)


@pytest.mark.slow
def test_classification_table(small_tables, tmp_path, monkeypatch, capsys):
    output = tmp_path / "table.json"
    arguments = {"seeds": "0,1", "epochs": 12, "max_length": 32, "dtype": "float32", "output": output}
    classification_table.main("routings", "CR", "Transformer;gated;random order", **arguments)
    rows = rows_of(output)
    assert len(rows) == 6
    assert {row["settings"].get("assignment", "neural") for row in rows} == {"full", "neural", "random"}
    assert all(row["accuracy"] >= 75 for row in rows), rows
    assert " (2)" in capsys.readouterr().out
    monkeypatch.setattr(classification_table, "measure", None)
    classification_table.main("routings", "CR", "Transformer;gated;random order", **arguments)
    assert rows_of(output) == rows


@pytest.mark.slow
def test_sweeps_of_the_classification_table(small_tables, tmp_path, monkeypatch, capsys):
    output = tmp_path / "table.json"
    arguments = {"seeds": "0", "epochs": 2, "max_length": 32, "output": output}
    classification_table.main("clusters", None, "Transformer;k=5", **arguments)
    classification_table.main("clusters", max_length=32, costs=True, repeats=2, output=output)
    *trained, transformer, few, _, _, _, _, _, most = rows_of(output)
    assert [row["settings"] for row in (transformer, few, most)] == [
        {"clusters": 20, "assignment": "full"},
        classification_table.CENTROIDS | {"clusters": 5},
        classification_table.CENTROIDS | {"clusters": 300},
    ]
    assert transformer["speedup"] == 1
    assert all(row["step_peak_bytes"] > 0 and row["step_ms"] > 0 for row in (transformer, few, most))
    monkeypatch.setattr(classification_table, "costs_of", None)
    classification_table.main("clusters", max_length=32, costs=True, output=output)
    with pytest.raises(typer.BadParameter, match="leave out --names"):
        classification_table.main("clusters", None, "Transformer", costs=True, output=output)
    assert len(trained) == 2
    classification_table.main("losses", "WikiQA", "neural, no loss;gated, L1 and L2", **arguments)
    assert "WikiQA - Transformer" in capsys.readouterr().out
    rows = [row for row in rows_of(output) if "measured" not in row]
    assert all(0 < row["map"] <= row["mrr"] <= 100 for row in rows[2:])
    pairs = classification_data.OF_PAIRS
    assert [row["settings"] for row in rows] == [
        {"clusters": 20, "assignment": "full"},
        classification_table.CENTROIDS | {"clusters": 5},
        pairs | {"clusters": 3, "gated": False, "cluster_loss_weight": 0.0, "sorting_loss_weight": 0.0},
        pairs | {"clusters": 3} | classification_table.LOSSES["gated, L1 and L2"],
    ]


def test_a_model_of_two_sweeps_is_trained_once():
    def runs(sweep, names):
        return [run for _, run in classification_table.planned(sweep, names, ["20 Newsgroups"], [0], None, None, None)]

    assert runs("routings", ["gated"]) == runs("losses", ["gated, no loss"])
    assert runs("routings", ["gated, centroids"]) == runs("clusters", ["k=20"])
    assert runs("routings", ["neural"]) == runs("losses", ["neural, L1 and L2"])


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (ClusterFormerConfig(), classification_table.CENTROIDS),
        (ClusterFormerConfig(is_encoder_decoder=True), classification_table.GATED),
        (ClusterFormerConfig(gated=False), classification_table.PAPERS_FORM),
    ],
)
def test_the_rows_are_those_of_the_models_defaults(config, settings):
    assert {name: getattr(config.settled(), name) for name in settings} == settings


def test_differences_are_those_of_the_same_seed():
    scores = {"Transformer": (80.0, 90.0), "neural": (81.0, 93.0)}
    rows = [
        {"dataset": "CR", "name": name, "seed": seed, "accuracy": value}
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]
    shown = classification_table.table(rows, "routings")
    assert shown.loc["neural", "CR"] == "87.0 ± 8.5 (2)"
    assert shown.loc["neural", "CR - Transformer"] == "2.0 ± 1.4 (2)"
    assert shown.loc["Transformer", "CR - Transformer"] == ""


def test_ranking_by_hand():
    """Answers on places 1 and 3 of the first question, on 2 of the second; the third has none."""
    questions = [
        [(0.9, True), (0.1, False), (0.5, False), (0.4, True)],
        [(0.3, True), (0.3, False)],
        [(0.8, False)],
    ]
    scores = answer_ranking.ranking(questions)
    assert scores == {"map": pytest.approx(100 * ((1 + 2 / 3) / 2 + 1 / 2) / 2), "mrr": pytest.approx(75.0)}
    with pytest.raises(ValueError, match="no question has an answer"):
        answer_ranking.ranking(questions[2:])


def test_letters_do_not_give_the_class_away(data_folder):
    """The two files of SUBJ differ in their encodings."""
    write_gzip(data_folder / "sentcls/subj.objective.gz", "an émigré\n".encode())
    write_gzip(data_folder / "sentcls/subj.subjective.gz", "an émigré\n".encode("latin-1"))
    examples = list(classification_data.DATA_SETS["SUBJ"].train())
    assert [example["text"] for example in examples] == ["an émigré"] * 2
    assert len({example["label"] for example in examples}) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sweep": "depth"}, "unknown sweep"),
        ({"names": "som"}, "unknown rows"),
        ({"data_sets": "TREC"}, "unknown data sets"),
    ],
    ids=str,
)
def test_unknown_choices_are_named(arguments, message, tmp_path):
    with pytest.raises(typer.BadParameter, match=message):
        classification_table.main(**arguments, output=tmp_path / "none.json")
