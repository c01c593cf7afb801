"""The command lines of the training scripts: what their help says, and which of them cannot be."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_effattn import training
from scripts.lra import train as run_lra
from scripts.train import classification as run_classification
from scripts.train import clm as run_clm
from scripts.train import embedding as run_embedding
from scripts.train import glue as run_glue
from scripts.train import mlm as run_mlm
from scripts.train import qa as run_qa
from scripts.train import translation as run_translation

TRAINING_SCRIPTS = (run_classification, run_clm, run_glue, run_lra, run_mlm, run_qa, run_translation)

ROOT = Path(run_qa.__file__).parents[2]
SCRIPTS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.glob("scripts/*/*.py"))
}


@pytest.mark.parametrize("script", [*TRAINING_SCRIPTS, run_embedding], ids=lambda script: script.__name__)
def test_help_says_what_a_script_does_and_names_its_own_options_first(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", [script.__file__])
    with pytest.raises(SystemExit) as left:
        script.main(["--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    name = Path(script.__file__).name
    required = {
        run_embedding: "--model_name_or_path MODEL_NAME_OR_PATH ",
        run_glue: "--task_name TASK_NAME ",
        run_lra: "--task TASK ",
    }.get(script, "")
    assert lines[0] == f"usage: {name} {required}--output_dir OUTPUT_DIR [options]"
    assert lines[2] == script.__doc__.splitlines()[0]
    command = "-m scripts.lra.train" if script is run_lra else f"scripts/train/{name}"
    assert any(line.startswith(f"    python {command} --") for line in lines)
    kind = "Seq2SeqTrainingArguments" if script is run_translation else "TrainingArguments"
    titles = ["model:", "data:", f"training (transformers' {kind}):"]
    more = {run_mlm: ["masks:"], run_embedding: ["loss:"]}.get(script, [])
    groups = [line for line in lines if line in (*titles, "masks:", "loss:")]
    assert groups == titles[:2] + more + titles[2:]
    model, data, training = (lines.index(title) for title in titles)
    first_of_model = "  --model_revision MODEL_REVISION" if script is run_embedding else "  --model_type MODEL_TYPE"
    assert model < lines.index(first_of_model) < data
    first = {run_glue: "--task_name {cola,", run_lra: "--task {listops,", run_translation: "--train_source TRAIN_S"}
    places = [number for number, line in enumerate(lines) if first.get(script, "--dataset_name DATASET_N") in line]
    assert data < places[-1] < training
    assert sum("(required)" in line for line in lines) == 1 + bool(required)
    assert "(required)" in "".join(lines[lines.index("  --output_dir OUTPUT_DIR") :][1:3])
    assert not any("(default: None)" in line or "--output-dir" in line for line in lines)


def test_help_has_the_defaults_of_the_task(capsys):
    with pytest.raises(SystemExit):
        run_lra.main(["--task", "listops", "--help"])
    assert "in a pair of each text. (default: 2000)" in " ".join(capsys.readouterr().out.split())


WITH_HELP = [name for name, path in SCRIPTS.items() if "run_with_help(main, __doc__)" in path.read_text()]


@pytest.mark.parametrize("name", sorted(WITH_HELP))
def test_help_of_the_other_scripts_has_their_examples_and_writes_nothing(name, monkeypatch, capsys):
    def written(*inputs, **options):
        raise AssertionError("a file is written")

    monkeypatch.setattr(Path, "write_text", written)
    monkeypatch.setattr(Figure, "savefig", written)
    path = SCRIPTS[name]
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"Usage: python -m {name}" in shown
    examples = [line for line in path.read_text().splitlines() if re.match(rf" *python -m {re.escape(name)}", line)]
    assert examples
    assert all(f"\n  {line}\n" in shown for line in examples)


def small_data(script, folder):
    """Arguments of a script that name data to train on, and those that name data to evaluate on; no test set."""
    for split in ("train", "dev"):
        (folder / "RTE").mkdir(exist_ok=True)
        (folder / "RTE" / f"{split}.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\tentailment\n")
    (folder / "mine").mkdir(exist_ok=True)
    shutil.copytree(folder / "RTE", folder / "mine" / "RTE", dirs_exist_ok=True)
    (folder / "mine" / "RTE" / "dev.tsv").unlink()
    (folder / "text.txt").write_text("a text\n" * 9)
    (folder / "classes.jsonl").write_text("".join(f'{{"text": "a {n}", "label": {n % 2}}}\n' for n in range(20)))
    row = {"id": 1, "question": "q", "context": "a b", "answers": {"text": ["b"], "answer_start": [2]}}
    (folder / "questions.jsonl").write_text(json.dumps(row))
    text, questions, classes = (str(folder / name) for name in ("text.txt", "questions.jsonl", "classes.jsonl"))
    named = {
        run_classification: (["--train_files", classes, "--validation_share", "0"], ["--validation_files", classes]),
        run_clm: (["--train_files", text], ["--validation_files", text]),
        run_glue: (["--task_name", "rte", "--data_dir", str(folder / "mine")], ["--data_dir", str(folder)]),
        run_qa: (["--train_files", questions], ["--validation_files", questions]),
        run_translation: (
            ["--train_source", text, "--train_target", text],
            ["--validation_source", text, "--validation_target", text],
        ),
    }
    named[run_mlm] = named[run_clm]
    return named[script]


@pytest.fixture
def not_loaded(monkeypatch):
    """Whatever comes after the checks: tokenizers, models."""

    def reached(*inputs, **options):
        raise AssertionError("a tokenizer is made")

    for script in TRAINING_SCRIPTS:
        if hasattr(script, "load_tokenizer"):
            monkeypatch.setattr(script, "load_tokenizer", reached)


WITH_FILES = [script for script in TRAINING_SCRIPTS if script is not run_lra]
PREDICTING = [script for script in WITH_FILES if script not in (run_clm, run_mlm, run_qa)]
ANY_MODEL = ["--model_type", "bert", "--use_cpu", "--report_to", "none"]


@pytest.mark.parametrize("script", WITH_FILES, ids=lambda script: script.__name__)
def test_what_is_asked_for_without_data_is_told_before_anything_is_made(script, tmp_path, not_loaded):
    train, evaluate = small_data(script, tmp_path)
    common = [*train, *ANY_MODEL, "--output_dir", str(tmp_path / "run")]
    options = {
        run_classification: "--validation_files, or hold out a --validation_share",
        run_glue: "dev.tsv in the folder RTE of --data_dir",
        run_translation: "--validation_source and --validation_target, or a --dataset_name that has them",
    }
    named = options.get(script, "--validation_files or a --dataset_name that has them")
    data = "the data of rte" if script is run_glue else "the data"
    for switches, option in (
        (["--do_train", "--do_eval"], "--do_eval"),
        (["--do_train", "--eval_strategy", "epoch"], "--eval_strategy epoch"),
        (["--do_train", "--eval_strategy", "steps", "--load_best_model_at_end"], "--eval_strategy steps"),
    ):
        message = f"{data} have no validation, which {option} needs (there are train): name them with {named}"
        with pytest.raises(ValueError, match=re.escape(message)):
            script.main([*common, *switches])
        with pytest.raises(AssertionError, match="a tokenizer is made"):
            script.main([*common, *evaluate, *switches])
    if script in PREDICTING:
        with pytest.raises(ValueError, match=r"have no test, which --do_predict needs .*: name them with \S*test"):
            script.main([*common, *evaluate, "--do_train", "--do_predict"])
    if script is not run_glue:
        with pytest.raises(ValueError, match=r"have no train, which --do_train needs \(there are validation\)"):
            script.main([*evaluate, *ANY_MODEL, "--output_dir", str(tmp_path), "--do_train", "--do_eval"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", TRAINING_SCRIPTS, ids=lambda script: script.__name__)
def test_a_run_that_does_nothing_is_none(script, tmp_path):
    """Before data are looked for, which are not named here."""
    named = {run_glue: ["--task_name", "rte"], run_lra: ["--task", "text"]}.get(script, [])
    common = [*named, *ANY_MODEL, "--output_dir", str(tmp_path)]
    predict = ", --do_predict" if script in (*PREDICTING, run_lra) else ""
    more = ", --verify_data" if script is run_lra else ""
    with pytest.raises(ValueError, match=f"of --do_train, --do_eval{predict}{more}$"):
        script.main(common)
    if not predict:
        with pytest.raises(ValueError, match="this script has no --do_predict: --do_eval"):
            script.main([*common, "--do_eval", "--do_predict"])
    with pytest.raises(ValueError, match="--resume_from_checkpoint last goes on with a training, and there is no"):
        script.main([*common, "--do_eval", "--resume_from_checkpoint", "last"])


@pytest.mark.parametrize("script", TRAINING_SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--method clustered", "no model: name a checkpoint with --model_name_or_path, or a kind with --model_type"),
        ("--model_name_or_path mine --model_type bert", "--model_type bert is of a model from scratch, and mine has"),
        ("--model_name_or_path mine --vocab_size 99", "--vocab_size 99 is of a tokenizer that is trained, .* of mine"),
        ("--model_name_or_path ./no-such-folder", "there is no folder ./no-such-folder"),
        ("--model_type bert --model_revision v2", "--model_revision is of a checkpoint: name it with --model_name"),
        ("--model_type bert --tokenizer_name bytes --vocab_size 99", "and that of bytes is taken as it is"),
    ],
)
def test_options_without_a_model_or_without_effect(script, options, message, tmp_path):
    named = {run_glue: ["--task_name", "rte"], run_lra: ["--task", "text"]}.get(script, [])
    with pytest.raises(ValueError, match=message):
        script.main([*named, *options.split(), "--do_train", "--use_cpu", "--output_dir", str(tmp_path)])


def test_the_long_range_arena_has_tokens_of_its_own(tmp_path):
    common = ["--task", "text", "--model_type", "bert", "--do_train", "--use_cpu", "--output_dir", str(tmp_path)]
    for option in (["--tokenizer_name", "bytes"], ["--vocab_size", "99"]):
        with pytest.raises(ValueError, match="leave out --tokenizer_name and --vocab_size"):
            run_lra.main([*common, *option])


def test_a_checkpoint_of_another_revision(tmp_path, monkeypatch):
    """Model, tokenizer and classes of it, from the cache of the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--mine"
    (folder / "refs").mkdir(parents=True)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for number, (revision, layers) in enumerate((("main", 1), ("v2", 2))):
        commit = str(number) * 40
        (folder / "refs" / revision).write_text(commit)
        tokenizer = training.train_tokenizer(["the cat sat"] * 9, 260 + layers)
        names = training.label_settings(["a", "b"] if revision == "main" else ["b", "a"])
        config = AutoConfig.for_model(
            "bert", vocab_size=len(tokenizer), **sizes | names | {"num_hidden_layers": layers}
        )
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "snapshots" / commit)
        tokenizer.save_pretrained(folder / "snapshots" / commit)
    for revision, layers, order in ((["--model_revision", "v2"], 2, ["b", "a"]), ([], 1, ["a", "b"])):
        command = ["--model_name_or_path", "me/mine", *revision, "--use_cpu", "--output_dir", str(tmp_path / "run")]
        parser = training.parser_of(None, run_classification.DataArguments)
        arguments, _, trained = parser.parse_args_into_dataclasses(command)
        tokenizer = training.load_tokenizer(arguments, trained, [])
        assert len(tokenizer) == 260 + layers
        model = training.make_model(arguments, AutoModelForSequenceClassification, tokenizer, {})
        assert model.config.num_hidden_layers == layers
        assert training.class_order(["a", "b"], arguments, trained) == order
        assert run_lra.model_type(arguments) == "bert"


def test_what_a_command_line_must_name(capsys, tmp_path):
    with pytest.raises(SystemExit):
        run_glue.main(["--task_name", "imdb", "--output_dir", str(tmp_path)])
    assert "invalid choice: 'imdb' (choose from" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_clm.main(["--do_train"])
    assert "the following arguments are required: --output_dir" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_clm.main(["--output_dir", str(tmp_path), "--save_dtype", "bf16"])
    assert "invalid choice: 'bf16' (choose from" in capsys.readouterr().err
