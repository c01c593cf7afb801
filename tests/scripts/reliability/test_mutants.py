"""The planted defects of `make mutants`: that they can be planted, and what the script makes of a tree."""

import json
from contextlib import nullcontext

import pytest

from scripts.reliability import mutants
from scripts.reliability._pytest_runs import PytestRuns
from scripts.reliability.mutants import ROOT, Mutant, first_failure, listed_mutants, try_mutant


def test_every_defect_can_be_planted():
    listed = listed_mutants()
    assert len(listed) >= 60
    assert len({mutant.name for mutant in listed}) == len(listed)
    for mutant in listed:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.planted(text) != text
        assert all((ROOT / test).is_file() for test in mutant.tests), mutant.name


def test_a_defect_that_is_no_longer_there_is_named():
    with pytest.raises(ValueError, match="its text occurs 0 times"):
        Mutant("gone", "a.py", "x + 1", "x", ("test_a.py",)).planted("x - 1")


def test_rows_of_defects_that_are_no_longer_listed_go_with_the_next_run(tmp_path, monkeypatch):
    listed = [Mutant(name, f"{name}.py", "x", "y", ("test_a.py",)) for name in ("kept", "new")]
    others = [{"name": "gone", "change": "0" * 12}, {"name": "kept", "change": "changed since"}]
    path = tmp_path / "mutants.json"
    rows = [row | {"caught": True, "failure": None} for row in (listed[0].identity, *others)]
    path.write_text(json.dumps({"rows": rows, "settings": {}}))
    monkeypatch.setattr(mutants, "listed_mutants", lambda: listed)
    monkeypatch.setattr(mutants, "copy_of_the_tree", lambda folder: folder)
    monkeypatch.setattr(mutants, "PytestRuns", nullcontext)
    outcome = {"caught": True, "failure": None, "seconds": 0.0}
    monkeypatch.setattr(mutants, "try_mutant", lambda mutant, *arguments: mutant.identity | outcome)
    mutants.main(only="new", output=path)
    assert [(row["name"], row["change"]) for row in json.loads(path.read_text())["rows"]] == [
        (mutant.name, mutant.identity["change"]) for mutant in listed
    ]


@pytest.mark.slow
def test_defects_are_caught_or_survive_and_leave_the_tree_as_it_was(tmp_path):
    (tmp_path / "code.py").write_text("def double(x):\n    return 2 * x  # twice\n")
    (tmp_path / "test_code.py").write_text(
        "from code import double\n\ndef test_double():\n    assert double(1) == 2\n"
    )
    caught, survives = (Mutant("", "code.py", *change, ()) for change in (("2 * x", "3 * x"), ("twice", "two times")))
    with PytestRuns() as runs:
        rows = [try_mutant(mutant, runs, tmp_path, ["test_code.py"]) for mutant in (caught, survives)]
        with pytest.raises(RuntimeError, match="pytest did not run"):
            first_failure(runs, tmp_path, ["missing.py"])
    assert [row["caught"] for row in rows] == [True, False]
    assert rows[0]["failure"] == "test_code.py::test_double"
    assert (tmp_path / "code.py").read_text() == "def double(x):\n    return 2 * x  # twice\n"
