"""GLUE: its files are read as the Hub has them, its metrics are the formulas, and the script learns and resumes."""

import gzip
import json

import numpy as np
import pytest
from support.script_runs import whole_and_resumed
from transformers import AutoModelForSequenceClassification

from hf_effattn import training
from hf_effattn.data import glue_tasks
from scripts.train import glue as run_glue

TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,max_position_embeddings=32"
RUN = "--use_cpu --report_to none --learning_rate 1e-2 --vocab_size 300 --max_length 32 --model_type bert".split()  # noqa: SIM905


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())


@pytest.fixture
def folder(tmp_path):
    """The benchmark's files, each kind of them, with few rows; a byte-order mark, quotation marks, words as NA."""
    folder = tmp_path / "glue"
    for split in ("train", "dev"):
        lines = [f"src\t{n % 2}\t\t{'He go' if n % 2 == 0 else 'He goes'} home {n}." for n in range(16)]
        write(folder / "CoLA" / f"{split}.tsv.gz", *lines)
        rows = [f'{n % 2}\t1\t2\tan " {n}\t{n if n % 2 else "NA"}' for n in range(4)]
        write(folder / "MRPC" / f"{split}.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows)
        rows = [f"{n}\tx\tA {n}.\tB {n % 4}.\t{n % 4}.500" for n in range(16)]
        write(folder / "STS-B" / f"{split}.tsv", "index\tgenre\tsentence1\tsentence2\tscore", *rows)
        rows = [f"{n}\tA {n}.\tB.\t{'not_entailment' if n % 2 else 'entailment'}" for n in range(4)]
        write(folder / "RTE" / f"{split}.tsv", "index\tsentence1\tsentence2\tlabel", *rows)
    write(folder / "CoLA" / "test.tsv", "index\tsentence", "0\tHe go.", "1\tHe goes.")
    write(folder / "RTE" / "test.tsv", "index\tsentence1\tsentence2", "0\tA.\tB.")
    for kind in ("matched", "mismatched"):
        rows = [f"{n}\tA.\tB {n}.\t{label}" for n, label in enumerate(glue_tasks.TASKS["mnli"].labels)]
        write(folder / "MNLI" / f"dev_{kind}.tsv", "index\tsentence1\tsentence2\tgold_label", *rows)
    return folder


def test_files_are_read_as_the_hub_has_them(folder):
    cola = glue_tasks.load_glue("cola", folder)
    assert cola["train"].features["label"].names == ["unacceptable", "acceptable"]
    assert cola["train"][:2] == {"sentence": ["He go home 0.", "He goes home 1."], "label": [0, 1]}
    assert cola["test"][:] == {"sentence": ["He go.", "He goes."], "label": [-1, -1]}
    mrpc = glue_tasks.load_glue("mrpc", folder)["train"]
    assert mrpc[0] == {"sentence1": 'an " 0', "sentence2": "NA", "label": 0}
    assert glue_tasks.load_glue("stsb", folder)["validation"]["label"][:3] == [0.5, 1.5, 2.5]
    assert glue_tasks.load_glue("rte", folder)["train"]["label"][:] == [0, 1, 0, 1]
    mnli = glue_tasks.load_glue("mnli", folder)
    assert set(mnli) == {"validation_matched", "validation_mismatched"}
    assert mnli["validation_matched"][2] == {"premise": "A.", "hypothesis": "B 2.", "label": 2}


def test_mistakes_in_what_is_asked_for(folder):
    with pytest.raises(ValueError, match="unknown task 'sst'"):
        glue_tasks.load_glue("sst", folder)
    with pytest.raises(FileNotFoundError, match=r"QNLI has none of train.tsv, dev.tsv, test.tsv"):
        glue_tasks.load_glue("qnli", folder)
    with pytest.raises(KeyError, match="the second argument names a task"):
        training.load_metric("glue", "imdb")


@pytest.mark.parametrize(
    ("task", "sizes"),
    [("cola", (8551, 1043)), ("mrpc", (3668, 408)), ("stsb", (5749, 1500)), ("rte", (2490, 277)), ("wnli", (635, 71))],
)
def test_the_real_files_have_all_their_rows(task, sizes, large_data):
    data = glue_tasks.load_glue(task, large_data("glue"))
    assert (len(data["train"]), len(data["validation"])) == sizes
    labels = data["train"]["label"][:]
    if task == "stsb":
        assert (min(labels), max(labels)) == (0, 5)
    else:
        assert set(labels) == set(range(len(glue_tasks.TASKS[task].labels)))
    assert all(data["train"][column][0] for column in glue_tasks.TASKS[task].texts)


def test_a_row_without_a_label_is_named(folder):
    write(folder / "QQP" / "train.tsv", "question1\tquestion2\tis_duplicate", "a\tb\t1", "a\tb\t")
    with pytest.raises(ValueError, match=r"train.tsv: row 2 of 2, not counting a header, has no label"):
        glue_tasks.load_glue("qqp", folder)


def test_splits_that_are_not_there_are_named_before_training(folder, tmp_path):
    common = [*RUN, "--task_name", "stsb", "--data_dir", str(folder), "--config_overrides", TINY]
    with pytest.raises(ValueError, match="the data of stsb have no test"):
        run_glue.main([*common, "--do_train", "--do_predict", "--output_dir", str(tmp_path / "run")])


def test_metrics_by_hand():
    scores = training.load_metric("glue", "mrpc").compute(predictions=[1, 1, 0, 1], references=[1, 0, 0, 1])
    assert scores == {"accuracy": 0.75, "f1": pytest.approx(2 * (2 / 3) / (2 / 3 + 1))}
    scores = training.load_metric("glue", "cola").compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
    # TP 2, TN 1, FP 1, FN 0.
    assert scores == {"matthews_correlation": pytest.approx((2 * 1 - 1 * 0) / np.sqrt(3 * 2 * 2 * 1))}
    scores = training.load_metric("glue", "stsb").compute(predictions=[1.0, 2.0, 4.0], references=[0.0, 1.0, 2.0])
    assert scores["spearmanr"] == pytest.approx(1.0)
    assert scores["pearson"] == pytest.approx(np.corrcoef([1, 2, 4], [0, 1, 2])[0, 1], abs=1e-6)
    assert training.load_metric("glue", "rte").compute(predictions=[0, 1], references=[0, 0]) == {"accuracy": 0.5}


def test_run_glue_learns_resumes_and_predicts(folder, tmp_path):
    common = [*RUN, "--task_name", "cola", "--data_dir", str(folder), "--config_overrides", TINY]
    common += "--do_train --do_eval --do_predict --max_steps 60 --save_steps 30".split()  # noqa: SIM905
    whole, resumed = whole_and_resumed(run_glue.main, common, tmp_path, step=30)
    assert whole["eval_matthews_correlation"] == 1.0
    assert (tmp_path / "whole" / "CoLA.tsv").read_text() == "index\tprediction\n0\t0\n1\t1\n"
    assert resumed["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    assert model.config.id2label == {0: "unacceptable", 1: "acceptable"}


@pytest.mark.slow
def test_predictions_of_a_model_trained_by_length_are_in_the_order_of_the_test_set(tmp_path):
    labels = [n * 7 % 10 % 2 for n in range(40)]
    texts = [f"{('bad', 'good')[label]}{' film' * (n * 11 % 13)}" for n, label in enumerate(labels)]
    rows = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
    for split in ("train", "dev"):
        write(tmp_path / "SST-2" / f"{split}.tsv", "sentence\tlabel", *rows)
    write(tmp_path / "SST-2" / "test.tsv", "index\tsentence", *(f"{n}\t{text}" for n, text in enumerate(texts)))
    common = [*RUN, "--task_name", "sst2", "--data_dir", str(tmp_path), "--config_overrides", TINY]
    common += "--do_train --do_eval --do_predict --max_steps 40 --train_sampling_strategy group_by_length".split()  # noqa: SIM905
    assert run_glue.main([*common, "--output_dir", str(tmp_path / "run")])["eval_accuracy"] == 1.0
    lines = (tmp_path / "run" / "SST-2.tsv").read_text().splitlines()
    assert lines[1:] == [f"{n}\t{label}" for n, label in enumerate(labels)]


def test_run_glue_of_scores(folder, tmp_path):
    common = [*RUN, "--task_name", "stsb", "--data_dir", str(folder), "--config_overrides", TINY]
    common += ["--max_eval_samples", "8", "--output_dir", str(tmp_path / "run")]
    metrics = run_glue.main([*common, "--do_train", "--do_eval", "--max_steps", "80"])
    assert metrics["eval_pearson"] > 0.9
    kept = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert kept["eval_spearmanr"] == metrics["eval_spearmanr"]


def test_run_glue_with_two_validation_sets_and_a_method(folder, tmp_path):
    """A checkpoint is evaluated with its attention replaced; both sets of MNLI are named in the result."""
    common = ["--use_cpu", "--report_to", "none", "--data_dir", str(folder)]
    rte = [*common, *RUN[3:], "--task_name", "rte", "--config_overrides", TINY, "--output_dir", str(tmp_path / "rte")]
    run_glue.main([*rte, "--do_train", "--max_steps", "1", "--do_predict"])
    assert (tmp_path / "rte" / "RTE.tsv").read_text().splitlines()[1].split("\t")[1] in glue_tasks.TASKS["rte"].labels
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rte", num_labels=3, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path / "rte")
    mnli = ["--task_name", "mnli", "--model_name_or_path", str(tmp_path / "rte"), "--do_eval"]
    method = ["--method", "i-clustered clusters=2 topk=2 min_length=0"]
    metrics = run_glue.main([*common, *mnli, *method, "--output_dir", str(tmp_path / "mnli")])
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= set(metrics)
