"""The demo as a command: what it prints before and while it works, and what it leaves."""

import sys

import pytest
from typer.testing import CliRunner

from hf_effattn.cli import app

runner = CliRunner()


@pytest.mark.filterwarnings("ignore:The patch will do nothing")  # below min_length
def test_the_demo_prints_its_steps_and_draws(real_model_folder, tmp_path, monkeypatch):
    for name, value in {"LENGTHS": (64, 513), "PASSAGE_LENGTH": 32, "PASSAGES_PER_BOOK": 1}.items():
        monkeypatch.setattr(f"hf_effattn.demo.run.{name}", value)
    file = tmp_path / "picture.png"
    result = runner.invoke(app, ["demo", "--output", str(file)])
    assert result.exit_code == 0, result.output
    for expected in (
        "Reading 6 passages of 32 tokens from 6 novels.\n",
        "Reading the first 64 tokens of Great Expectations, exact: ",
        "Reading the first 513 tokens of Great Expectations, patched: ",
        "all tokens moved by 0% (relative L2)",
        "is 1.0000,\n  and all 5 nearest passages stayed",
        f"The picture: {file}\n",
    ):
        assert expected in result.output
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "module", "message"),
    [(["--output", "no/such/folder.png"], "no_module", "no file in a folder"), ([], "matplotlib.figure", "[plots]")],
)
def test_mistakes_are_told_before_a_model_is_loaded(arguments, module, message, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("hf_effattn.demo.run.load_model", lambda name: pytest.fail("the model was loaded"))
    result = runner.invoke(app, ["demo", *arguments])
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
