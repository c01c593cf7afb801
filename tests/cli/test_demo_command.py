"""The command line: what it passes on, what it prints, how it fails."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_effattn.cli import app

runner = CliRunner()


def test_help_names_the_demo_and_its_options():
    assert "demo" in runner.invoke(app, ["--help"]).output
    shown = runner.invoke(app, ["demo", "--help"], env={"COLUMNS": "200"}).output
    assert all(option in shown for option in ("--model", "--text", "--output", "--lengths", "--quick"))


def test_quick_demo_prints_tables_paths_and_meaning(real_model_folder, tmp_path):
    result = runner.invoke(app, ["demo", "--quick", "--output", str(tmp_path), "--lengths", "64"])
    assert result.exit_code == 0, result.output
    for expected in (
        "Sentence embeddings",
        "64 tokens",
        "i-clustered clusters=25 topk=32",
        "bi-clustered",
        "key_clusters=50",
        "attention_pattern.png",
        "What this means",
        # No terminal: a line for every step.
        "step 1 of 3, loading the model\n",
        "step 2 of 3, embeddings, 64 tokens\n",
        "step 2 of 3, attention of layer 5, 64 tokens\n",
        "step 3 of 3, drawing\n",
    ):
        assert expected in result.output
    assert result.output.count("embeddings, 64 tokens") == 1
    assert max(map(len, result.output.splitlines())) <= 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "128,x"], "numbers of tokens"),
        (["--lengths", "0"], "above 0"),
        (["--lengths", "5"], "at least 8"),
        (["--text", "no-such-file.txt"], "there is no file"),
        (["--model", "./no-such-folder"], "Error"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments, message, tmp_path):
    result = runner.invoke(app, ["demo", "--output", str(tmp_path / "out"), *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_the_package_runs_as_a_module():
    shown = subprocess.run([sys.executable, "-m", "hf_effattn", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in shown.stdout
