"""The times of a new user's first steps: that of a command, and the file of them."""

import json
import subprocess
import sys

import pytest
import typer

from scripts.benchmark import first_minutes

PRINTS_LATE = "import time; time.sleep(0.2); print('begun', flush=True); time.sleep(0.2)"


def test_a_command_is_timed_to_its_first_line_and_its_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    times = first_minutes.timed([sys.executable, "-c", PRINTS_LATE], tmp_path)
    assert 0.2 < times["first_output"] < times["seconds"] - 0.2
    first_minutes.timed([sys.executable, "-c", "import os; print('PYTHONPATH' in os.environ)"], tmp_path)
    assert capfd.readouterr().out == "begun\nFalse\n"
    assert first_minutes.timed(["true"], tmp_path)["first_output"] is None
    with pytest.raises(subprocess.CalledProcessError):
        first_minutes.timed(["false"], tmp_path)


def test_the_steps_up_to_one_are_kept(tmp_path, monkeypatch):
    root = tmp_path / "root"
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    monkeypatch.setattr(first_minutes, "ROOT", root)
    monkeypatch.setattr(first_minutes, "STEPS", {"one": [["true"]], "two": [["false"]]})
    output = tmp_path / "times.json"
    first_minutes.main("one", output)
    (row,) = json.loads(output.read_text())["rows"]
    assert row["step"] == "one"
    assert "device_name" in row
    with pytest.raises(typer.BadParameter, match="three"):
        first_minutes.main("three", output)
