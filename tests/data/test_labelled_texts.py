"""Texts of a classifier: their classes and encodings, which of them are used, and what is predicted of the rest."""

import gzip
import json

import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import AutoConfig

from hf_effattn.data.labelled_texts import DataArguments, load_classes, load_texts, with_class_numbers
from scripts.train import classification as run_classification

SMALL = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
RUN = (
    f"--use_cpu --report_to none --vocab_size 300 --max_length 16 --model_type bert --config_overrides {SMALL}".split()
)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def films(count, *, labelled=True, names=("bad", "good")):
    """Texts whose class is one of their words."""
    rows = [{"text": f"a {names[n % len(names)]} film of {n}"} for n in range(count)]
    return [row | {"label": names[n % len(names)]} for n, row in enumerate(rows)] if labelled else rows


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([10, 2, 1, 0], ["0", "1", "2", "10"]),
        (["10", "9.5", "-1"], ["-1", "9.5", "10"]),
        (["10", "2", "b2", "a"], ["10", "2", "a", "b2"]),
    ],
    ids=["numbers", "strings", "words"],
)
def test_classes_that_are_numbers_stand_in_their_order(labels, expected, tmp_path):
    path = write(tmp_path / "train.jsonl", [{"text": "a", "label": label} for label in labels])
    rows = load_texts(DataArguments(train_files=[path]), hold_out=False)["train"]
    assert rows.features["label"].names == expected
    assert [expected[number] for number in rows["label"]] == list(map(str, labels))


def test_class_files_have_their_encodings(tmp_path):
    """A letter that is read wrongly would tell which file it is from; a compressed file is read like another."""
    (tmp_path / "latin.txt").write_bytes("plain\n\nun émigré \n".encode("latin-1"))
    (tmp_path / "utf.txt.gz").write_bytes(gzip.compress("un émigré\n".encode()))
    files = [str(tmp_path / name) for name in ("latin.txt", "utf.txt.gz")]
    rows = load_classes(files, ["latin-1", "utf-8"])
    assert rows[:] == {"text": ["plain", "un émigré ", "un émigré"], "label": [0, 0, 1]}
    assert load_classes(files[:1], ["latin-1"])["text"][:] == ["plain", "un émigré "]
    arguments = DataArguments(class_files=files, encoding=["latin-1", "utf-8"])
    assert load_texts(arguments, hold_out=False)["train"]["text"][:] == rows["text"][:]


@pytest.mark.parametrize(
    ("encodings", "message"),
    [
        (["utf-8"], r"latin.txt(\.gz)?: line 3 is not text in utf-8: pass --encoding, .* such as latin-1"),
        (["latin-1"] * 3, "--encoding has 3 names for 2 class files: give one, or one of each"),
        (["latin-2000"], "unknown encoding 'latin-2000'; Python's are allowed"),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_what_is_not_text_is_an_error(packed, encodings, message, tmp_path):
    data = "plain\n\nun émigré\n".encode("latin-1")
    path = tmp_path / ("latin.txt.gz" if packed else "latin.txt")
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(ValueError, match=message):
        load_classes([str(path)] * 2, encodings)


def test_only_an_evaluation_takes_texts_from_the_training(tmp_path, monkeypatch):
    """And only the splits that are used become tokens."""
    seen = []
    original = run_classification.tokenize_texts

    def tokenize_texts(rows, **options):
        seen.append(len(rows["text"]))
        return original(rows, **options)

    monkeypatch.setattr(run_classification, "tokenize_texts", tokenize_texts)
    files = ["--train_files", write(tmp_path / "train.jsonl", films(20))]
    files += ["--test_files", write(tmp_path / "test.jsonl", films(6))]
    common = [*RUN, *files, "--do_train", "--num_train_epochs", "1", "--per_device_train_batch_size", "1"]
    for number, (switches, sizes) in enumerate(
        [
            (["--do_predict"], [20, 6]),
            (["--eval_strategy", "epoch"], [18, 2]),
            (["--do_eval", "--do_predict", "--max_eval_samples", "1", "--max_predict_samples", "3"], [18, 1, 3]),
        ]
    ):
        seen.clear()
        more = ["--max_length", str(16 + number), "--output_dir", str(tmp_path / str(number))]  # else from the cache
        metrics = run_classification.main([*common, *switches, *more])
        assert seen == sizes
        assert metrics["train_samples_per_second"] > 0
        state = json.loads((tmp_path / str(number) / "trainer_state.json").read_text())
        assert state["global_step"] == sizes[0]


def test_predictions_are_named_and_need_no_labels(tmp_path):
    """The same with labels and without, and by a model that is loaded alone; those drawn have the numbers of rows."""
    train = ["--train_files", write(tmp_path / "train.jsonl", films(40))]
    test = ["--test_files", write(tmp_path / "test.jsonl", films(12, labelled=False))]
    run = ["--do_predict", "--output_dir", str(tmp_path / "run")]
    learn = ["--do_train", "--learning_rate", "1e-2", "--num_train_epochs", "10"]
    metrics = run_classification.main([*RUN, *train, *test, *run, *learn])
    assert "test_accuracy" not in metrics
    lines = (tmp_path / "run" / "predictions.tsv").read_text().splitlines()
    assert lines == ["index\tprediction", *(f"{n}\t{('bad', 'good')[n % 2]}" for n in range(12))]

    loaded = ["--use_cpu", "--report_to", "none", "--max_length", "16", "--model_name_or_path", str(tmp_path / "run")]
    nothing = [row | {"label": None} for row in films(12, labelled=False)]
    for name, rows in (("labelled", films(12)), ("nothing", nothing), ("unlabelled", films(12, labelled=False))):
        file = write(tmp_path / f"{name}.jsonl", rows)
        output = ["--do_predict", "--output_dir", str(tmp_path / name)]
        metrics = run_classification.main([*loaded, "--test_files", file, *output])
        assert metrics.get("test_accuracy") == (1.0 if name == "labelled" else None)
        assert (tmp_path / name / "predictions.tsv").read_text().splitlines() == lines
    few = ["--max_predict_samples", "5", "--do_predict", "--output_dir", str(tmp_path / "few")]
    run_classification.main([*loaded, *test, *few])
    drawn = (tmp_path / "few" / "predictions.tsv").read_text().splitlines()
    assert len(drawn) == 6
    assert set(drawn) <= set(lines)


def test_labels_are_missed_before_anything_is_made(tmp_path):
    unlabelled = write(tmp_path / "unlabelled.jsonl", films(4, labelled=False))
    some = write(tmp_path / "some.jsonl", [*films(4), {"text": "a", "label": None}])
    other = write(tmp_path / "other.jsonl", films(4, names=("good", "fair")))
    train = write(tmp_path / "train.jsonl", films(20))
    common = [*RUN, "--output_dir", str(tmp_path / "run")]
    with pytest.raises(ValueError, match="no labels in a column 'label'; name it with --label_column, there are text"):
        run_classification.main([*common, "--train_files", unlabelled, "--do_train"])
    with pytest.raises(ValueError, match="some texts of 'train' have no label in the column 'label'"):
        run_classification.main([*common, "--train_files", some, "--do_train"])
    with pytest.raises(ValueError, match="'test' has classes that 'train' lacks: fair"):
        run_classification.main([*common, "--train_files", train, "--test_files", other, "--do_train", "--do_predict"])
    with pytest.raises(ValueError, match="no classes: the texts have no labels, and no classifier is named"):
        run_classification.main([*common, "--test_files", unlabelled, "--do_predict"])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"class_files": ["a", "b"], "validation_files": ["v"]}, "^--class_files and --validation_files name data in"),
        ({"dataset_name": "some/name", "train_files": ["t"]}, "^--dataset_name and --train_files name data in more"),
        ({"dataset_name": "some/name", "class_files": ["a"]}, "leave out all but one of --dataset_name, .*; or --cla"),
        ({"dataset_config_name": "de", "test_files": ["t"]}, "^--dataset_config_name and --test_files name data in"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_data_are_named_in_one_way(named, message):
    with pytest.raises(ValueError, match=message):
        load_texts(DataArguments(**named))


def test_labels_are_of_the_column_that_is_named(tmp_path):
    """And of no other, though it be called `label`."""
    rows = [row | {"fine": ("x", "y", "z")[n % 3]} for n, row in enumerate(films(6))]
    path = write(tmp_path / "train.jsonl", rows)
    data = load_texts(DataArguments(train_files=[path], label_column="fine"), hold_out=False)["train"]
    assert data.features["label"].names == ["x", "y", "z"]
    assert data["label"][:] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match=r"no labels in a column 'fin'; name it .*, there are text, label, fine"):
        load_texts(DataArguments(train_files=[path], label_column="fin"), hold_out=False)
    test = load_texts(DataArguments(test_files=[path], label_column="fin"))["test"]
    assert test.column_names == ["text", "fine"]


def test_texts_on_whose_class_nobody_agreed_are_left_out():
    """As SNLI has them; a test keeps its rows, by whose numbers it is predicted."""

    def rows(labels):
        rows = Dataset.from_dict({"text": [f"a {n}" for n in range(len(labels))], "label": labels})
        return rows.cast_column("label", ClassLabel(names=["bad", "good"]))

    data = DatasetDict(train=rows([0, -1, 1, None, -1]), validation=rows([1, -1]), test=rows([0, -1, 1]))
    with pytest.warns(UserWarning, match="have no class") as warned:
        agreed = with_class_numbers(data, "label")
    assert [str(warning.message).partition(" have")[0] for warning in warned] == [
        "3 of 5 texts of 'train'",
        "1 of 2 texts of 'validation'",
        "1 of 3 texts of 'test'",
    ]
    assert agreed["train"][:] == {"text": ["a 0", "a 2"], "label": [0, 1]}
    assert agreed["validation"][:] == {"text": ["a 0"], "label": [1]}
    assert agreed["test"][:] == {"text": ["a 0", "a 1", "a 2"]}


def test_no_text_is_evaluated_that_another_run_was_trained_on(tmp_path):
    """A run without training cannot know which of them its model has seen."""
    files = ["--train_files", write(tmp_path / "train.jsonl", films(20))]
    common = [*RUN, *files, "--output_dir", str(tmp_path / "run")]
    with pytest.raises(ValueError, match=r"no validation, which --do_eval needs .*name them with --validation_files"):
        run_classification.main([*common, "--do_eval"])


def test_a_length_beyond_the_positions_is_told_before_texts_become_tokens(tmp_path, monkeypatch):
    def tokenize_texts(rows, **options):
        raise AssertionError("texts become tokens")

    monkeypatch.setattr(run_classification, "tokenize_texts", tokenize_texts)
    common = [*RUN, "--train_files", write(tmp_path / "train.jsonl", films(4)), "--output_dir", str(tmp_path / "run")]
    common += ["--do_train", "--config_overrides", f"{SMALL},max_position_embeddings=16", "--max_length"]
    with pytest.raises(ValueError, match=r"--max_length 17 needs max_position_embeddings=17 or more, .*=16: cut"):
        run_classification.main([*common, "17"])
    with pytest.raises(AssertionError, match="texts become tokens"):
        run_classification.main([*common, "16"])


def test_a_checkpoint_with_classes_in_the_alphabet_s_order_keeps_it(tmp_path):
    """As runs have it that were stopped when "10" stood before "2"."""
    names = [str(n) for n in range(11)]
    file = write(tmp_path / "train.jsonl", films(44, names=names))
    common = [*RUN, "--train_files", file, "--do_train", "--save_steps", "2", "--per_device_train_batch_size", "8"]
    common += ["--output_dir", str(tmp_path / "run"), "--resume_from_checkpoint", "last"]
    run_classification.main([*common, "--max_steps", "2"])
    path = tmp_path / "run" / "checkpoint-2" / "config.json"
    config = json.loads(path.read_text())
    assert list(config["id2label"].values()) == names
    config["id2label"] = dict(enumerate(sorted(names)))
    config["label2id"] = {name: number for number, name in enumerate(sorted(names))}
    path.write_text(json.dumps(config))
    run_classification.main([*common, "--max_steps", "4"])
    assert list(AutoConfig.from_pretrained(tmp_path / "run").id2label.values()) == sorted(names)
