"""`effattn card`: where it writes, what it refuses, and that it says what the library's card says."""

import json

import pytest
from support.round_trips import KINDS, changed, inputs_for
from typer.testing import CliRunner

import hf_effattn
from hf_effattn.cli import app

runner = CliRunner()


@pytest.fixture
def folder(tmp_path):
    kind = KINDS["bert-cst"]
    changed(kind.build(), kind).save_pretrained(tmp_path / "tuned")
    return tmp_path / "tuned"


def run(*arguments):
    return runner.invoke(app, ["card", *map(str, arguments)])


def test_it_is_written_into_the_folder_once(folder):
    result = run(folder, "--repo-id", "me/tuned", "--license", "mit")
    assert result.exit_code == 0, result.output
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert 'from_pretrained(AutoModelForSequenceClassification, "me/tuned")' in text
    assert "license: mit" in text
    result = run(folder)
    assert result.exit_code == 1
    assert "is there already" in result.stderr
    assert (folder / "README.md").read_text(encoding="utf-8") == text
    assert run(folder, "--overwrite").exit_code == 0
    assert (folder / "README.md").read_text(encoding="utf-8") != text


def test_report_and_results_become_tables(folder, tmp_path):
    model = KINDS["bert-clustered"].build()
    hf_effattn.report(model, inputs_for(model), ["clustered"], repeats=0).save(tmp_path / "report", pictures=False)
    (tmp_path / "all_results.json").write_text(json.dumps({"eval_accuracy": 0.75}))
    arguments = ["--report", tmp_path / "report", "--results", tmp_path / "all_results.json", "--dataset", "a/sst2"]
    result = run(folder, *arguments, "--show")
    assert result.exit_code == 0, result.output
    assert "## What it costs and gains" in result.stdout
    assert "| sst2, validation | accuracy | 0.75 |" in result.stdout
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["no-such-folder"], 1, "is no folder here"),
        (["./no-such-folder", "--show"], 1, "there is no folder ./no-such-folder"),
        (["FOREIGN", "--show"], 1, "has no config.json"),
        (["FOLDER", "--results", "x.json"], 2, "needs --dataset"),
        (["FOLDER", "--results", "x.json", "--dataset", "a/b"], 1, "--results: there is no file x.json"),
        (["FOLDER", "--results", "FOREIGN/words.json", "--dataset", "a/b"], 1, "words.json is not JSON"),
        (["FOLDER", "--report", "nowhere"], 1, "--report: nowhere has no report.json"),
        (["FOLDER", "--report", "FOREIGN"], 1, "no report of hf_effattn"),
        (["FOLDER", "--results", "FOREIGN/list.json", "--dataset", "a/b"], 1, "got a list"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(arguments, status, message, folder, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "words.json").write_text("accuracy")
    places = {"FOLDER": str(folder), "FOREIGN": str(tmp_path)}
    result = run(*["/".join(places.get(part, part) for part in argument.split("/")) for argument in arguments])
    assert result.exit_code == status
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (folder / "README.md").exists()
