"""A fine-tuned classifier keeps the order of its classes, whatever the data's; other classes are no match for it."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_effattn import training
from scripts.train import classification as run_classification
from scripts.train import glue as run_glue

# From small random weights every text would be of one class.
SIZES: dict[str, float] = {
    "initializer_range": 0.5,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
# The benchmark's order, and that of roberta-large-mnli.
MNLI, OTHER = ("entailment", "neutral", "contradiction"), ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
RUN = "--use_cpu --report_to none --max_length 16".split()  # noqa: SIM905
TEXTS = [f"{word} {number}" for number in range(8) for word in ("cat", "dog", "one", "two", "old")]


def save(folder, names, order):
    """A classifier whose outputs stand in `order`, with those names; the same weights in every order."""
    tokenizer = training.train_tokenizer(TEXTS, 300, pairs=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", vocab_size=len(tokenizer), num_labels=len(order), **SIZES)
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.classifier.weight.copy_(model.classifier.weight[list(order)])
    if names:
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def checkpoints(tmp_path):
    """The same classifier in the order of the benchmark, once without names, and in the other one."""
    return {
        "own": save(tmp_path / "own", MNLI, (0, 1, 2)),
        "unnamed": save(tmp_path / "unnamed", (), (0, 1, 2)),
        "permuted": save(tmp_path / "permuted", OTHER, (2, 1, 0)),
    }


@pytest.fixture
def mnli(tmp_path):
    folder = tmp_path / "glue" / "MNLI"
    folder.mkdir(parents=True)
    rows = [f"{n}\t{text}.\tB {n}." for n, text in enumerate(TEXTS)]
    for kind in ("matched", "mismatched"):
        labelled = [f"{row}\t{MNLI[n % 3]}" for n, row in enumerate(rows)]
        for name, lines, header in (("dev", labelled, "\tgold_label"), ("test", rows, "")):
            text = "\n".join([f"index\tsentence1\tsentence2{header}", *lines])
            (folder / f"{name}_{kind}.tsv").write_text(text)
    return str(folder.parent)


def test_run_glue_evaluates_in_the_order_of_the_checkpoint(checkpoints, mnli, tmp_path):
    metrics, files = {}, {}
    for name, path in checkpoints.items():
        output = tmp_path / "runs" / name
        arguments = ["--task_name", "mnli", "--data_dir", mnli, "--model_name_or_path", path, "--do_eval"]
        metrics[name] = run_glue.main([*RUN, *arguments, "--do_predict", "--output_dir", str(output)])
        files[name] = [(output / file).read_text() for file in ("MNLI-m.tsv", "MNLI-mm.tsv")]
    for name in ("unnamed", "permuted"):
        assert files[name] == files["own"]
        for metric in ("eval_matched_accuracy", "eval_mismatched_accuracy"):
            assert metrics[name][metric] == metrics["own"][metric]
        assert metrics[name]["eval_matched_loss"] == pytest.approx(metrics["own"]["eval_matched_loss"], abs=1e-5)
    predicted = {line.split("\t")[1] for line in files["own"][0].splitlines()[1:]}
    assert len(predicted) > 1  # else every order would look alike
    assert predicted <= set(MNLI)


def test_f1_is_of_the_benchmark_s_class(tmp_path):
    """Of MRPC it counts the equivalent pairs, which a checkpoint may have as its class 0."""
    names = ("not_equivalent", "equivalent")
    paths = [save(tmp_path / "own", names, (0, 1)), save(tmp_path / "permuted", names[::-1], (1, 0))]
    folder = tmp_path / "glue" / "MRPC"
    folder.mkdir(parents=True)
    rows = [f"{int(n % 3 == 0)}\t1\t2\t{text}\tB {n}" for n, text in enumerate(TEXTS)]
    (folder / "dev.tsv").write_text("\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows]))
    metrics = []
    for path in paths:
        arguments = ["--task_name", "mrpc", "--data_dir", str(folder.parent), "--model_name_or_path", path]
        metrics.append(run_glue.main([*RUN, *arguments, "--do_eval", "--output_dir", str(tmp_path / "run")]))
    assert metrics[1]["eval_f1"] == metrics[0]["eval_f1"] > 0
    assert metrics[0]["eval_accuracy"] != pytest.approx(metrics[0]["eval_f1"])


def pairs(path, names=MNLI):
    rows = [{"text": text, "label": names[n % len(names)]} for n, text in enumerate(TEXTS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_run_classification_keeps_the_order_of_the_checkpoint(checkpoints, tmp_path):
    """Evaluated as it is and, with no learning, after training; what is saved has the checkpoint's names."""
    files = ["--train_files", pairs(tmp_path / "train.jsonl"), "--validation_files", pairs(tmp_path / "dev.jsonl")]
    whole = [*RUN, *files, "--do_train", "--do_eval", "--learning_rate", "0", "--max_steps", "1"]
    metrics = {}
    for name, path in checkpoints.items():
        output = ["--output_dir", str(tmp_path / "runs" / name)]
        metrics[name] = run_classification.main([*whole, "--model_name_or_path", path, *output])
    # The data's classes stand in the order of the alphabet, which is neither of the two others.
    assert metrics["permuted"]["eval_accuracy"] == metrics["own"]["eval_accuracy"]
    assert metrics["unnamed"]["eval_accuracy"] != metrics["own"]["eval_accuracy"]
    assert metrics["permuted"]["train_loss"] == pytest.approx(metrics["own"]["train_loss"], rel=1e-3)
    config = AutoConfig.from_pretrained(tmp_path / "runs" / "permuted")
    assert config.id2label == dict(enumerate(OTHER))


def test_texts_to_evaluate_on_may_lack_a_class(checkpoints, tmp_path):
    """Two of the three classes: the accuracy is that of both orders alike."""
    file = pairs(tmp_path / "dev.jsonl", MNLI[:2])
    arguments = [*RUN, "--validation_files", file, "--do_eval", "--output_dir", str(tmp_path / "run")]
    accuracies = [
        run_classification.main([*arguments, "--model_name_or_path", checkpoints[name]])["eval_accuracy"]
        for name in ("own", "permuted")
    ]
    assert 0 < accuracies[0] == accuracies[1] < 1


@pytest.mark.slow_except("two")
@pytest.mark.parametrize("names", [("negative", "positive"), ("red", "green", "blue")], ids=["two", "three"])
def test_other_classes_are_an_error_or_a_new_head(names, checkpoints, tmp_path):
    files = ["--train_files", pairs(tmp_path / "train.jsonl", names)]
    files += ["--validation_files", pairs(tmp_path / "dev.jsonl", names)]
    common = [*RUN, *files, "--model_name_or_path", checkpoints["permuted"], "--output_dir", str(tmp_path / "run")]
    classes = f"has 3 classes, CONTRADICTION, NEUTRAL, ENTAILMENT, the data have {len(names)}"
    with pytest.raises(ValueError, match=f"{classes}.*--ignore_mismatched_sizes"):
        run_classification.main([*common, "--do_train", "--max_steps", "1"])
    with pytest.raises(ValueError, match=f"{classes}.*name the data's classes as the checkpoint does$"):
        run_classification.main([*common, "--do_eval", "--ignore_mismatched_sizes"])
    run_classification.main([*common, "--do_train", "--max_steps", "1", "--ignore_mismatched_sizes"])
    config = AutoConfig.from_pretrained(tmp_path / "run")
    assert set(config.label2id) == set(names)


def test_the_benchmark_has_all_classes_of_its_task(tmp_path):
    path = save(tmp_path / "three", ("negative", "neutral", "positive"), (0, 1, 2))
    folder = tmp_path / "glue" / "SST-2"
    folder.mkdir(parents=True)
    (folder / "dev.tsv").write_text("sentence\tlabel\na film\t1\n")
    arguments = ["--task_name", "sst2", "--data_dir", str(folder.parent), "--model_name_or_path", path, "--do_eval"]
    with pytest.raises(ValueError, match="has 3 classes, negative, neutral, positive, the data have 2"):
        run_glue.main([*RUN, *arguments, "--output_dir", str(tmp_path / "run")])
