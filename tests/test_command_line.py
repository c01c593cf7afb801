"""The command lines of the training scripts: what their help says, and which of them cannot be."""

import runpy
import sys
from pathlib import Path

import pytest
import run_classification
import run_clm
import run_glue
import run_lra
import run_mlm
import run_qa
import run_translation
from matplotlib.figure import Figure

TRAINING_SCRIPTS = (run_classification, run_clm, run_glue, run_lra, run_mlm, run_qa, run_translation)

SCRIPTS = {path.stem: path for path in Path(run_qa.__file__).parent.glob("*.py")}


@pytest.mark.parametrize("script", TRAINING_SCRIPTS, ids=lambda script: script.__name__)
def test_help_says_what_a_script_does_and_names_its_own_options_first(script, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", [script.__file__])
    with pytest.raises(SystemExit) as left:
        script.main(["--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    name = Path(script.__file__).name
    required = {run_glue: "--task_name TASK_NAME ", run_lra: "--task TASK "}.get(script, "")
    assert lines[0] == f"usage: {name} {required}--output_dir OUTPUT_DIR [options]"
    assert lines[2] == script.__doc__.splitlines()[0]
    assert any(line.startswith(f"    python scripts/{name} --") for line in lines)
    kind = "Seq2SeqTrainingArguments" if script is run_translation else "TrainingArguments"
    titles = ["model:", "data:", f"training (transformers' {kind}):"]
    groups = [line for line in lines if line in (*titles, "masks:")]
    assert groups == (titles[:2] + ["masks:"] * (script is run_mlm) + titles[2:])
    model, data, training = (lines.index(title) for title in titles)
    assert model < lines.index("  --model_type MODEL_TYPE") < data
    own = {run_glue: "--task_name {cola,", run_lra: "--task {listops,", run_translation: "--train_source TRAIN_S"}
    found = [number for number, line in enumerate(lines) if own.get(script, "--dataset_name DATASET_N") in line]
    assert data < found[-1] < training
    assert sum("(required)" in line for line in lines) == 1 + bool(required)
    assert "(required)" in "".join(lines[lines.index("  --output_dir OUTPUT_DIR") :][1:3])
    assert not any("(default: None)" in line or "--output-dir" in line for line in lines)


def test_help_has_the_defaults_of_the_task(capsys):
    with pytest.raises(SystemExit):
        run_lra.main(["--task", "listops", "--help"])
    assert "in a pair of each text. (default: 2000)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "name",
    [
        *("approximate", "classification_table", "cst_training", "lra_table", "perplexity", "translation_table"),
        *("attention_plots", "update_readme"),
    ],
)
def test_help_of_the_other_scripts_has_their_examples_and_writes_nothing(name, monkeypatch, capsys):
    def written(*inputs, **options):
        raise AssertionError("a file is written")

    monkeypatch.setattr(Path, "write_text", written)
    monkeypatch.setattr(Figure, "savefig", written)
    path = SCRIPTS[name]
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"Usage: {name}.py" in shown
    examples = [line for line in path.read_text().splitlines() if line.startswith("    python scripts/")]
    assert bool(examples) == (name not in ("attention_plots", "update_readme"))
    assert all(f"\n  {line}\n" in shown for line in examples)


def test_what_a_command_line_must_name(capsys, tmp_path):
    with pytest.raises(SystemExit):
        run_glue.main(["--task_name", "imdb", "--output_dir", str(tmp_path)])
    assert "invalid choice: 'imdb' (choose from" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_clm.main(["--do_train"])
    assert "the following arguments are required: --output_dir" in capsys.readouterr().err
