"""What the reliability scripts say of runs and files that are known to be good or bad."""

import gc
import json
import os
import random
import re
import resource
import signal
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

import hf_effattn
from scripts.publish import reliability_tables
from scripts.reliability import _children, corpora, faults, memory, versions
from scripts.reliability._children import Child, run
from scripts.reliability._tiny import KINDS, ids_of, tiny


def test_children_answer_raise_and_are_killed(tmp_path):
    assert run(lambda: {"value": os.getpid()}, tmp_path / "said")["value"] != os.getpid()

    def fail():
        raise ValueError("in words")

    with pytest.raises(RuntimeError, match="ValueError: in words"):
        run(fail, tmp_path / "said")
    with pytest.raises(RuntimeError, match="ended with -9"):
        run(lambda: os.kill(os.getpid(), 9), tmp_path / "said")
    with pytest.raises(TimeoutError):
        run(lambda: time.sleep(60), tmp_path / "said", longest=0.2)
    child = Child(lambda: time.sleep(60), tmp_path / "said")
    assert child.kill(after=0.1)
    assert not child.process.is_alive()


def test_what_a_child_said_last_names_no_folder_of_this_machine(tmp_path):
    """A traceback that a full disk cuts ends in the path of a file."""

    lines = f'Traceback (most recent call last):\n  File "{_children.__file__}"'

    def cut():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines), resource.RLIM_INFINITY))
        raise ArithmeticError

    with pytest.raises(RuntimeError, match=r'File "scripts/reliability/_children\.py"$') as raised:
        run(cut, tmp_path / "said")
    assert str(Path(__file__).parents[3]) not in str(raised.value)


def test_no_result_names_a_folder_of_a_machine():
    results = list((Path(__file__).parents[3] / "scripts" / "results").glob("*.json"))
    assert results
    for path in results:
        match = re.search(r"(?<![\w.:])/(home|root|work|tmp|Users|mnt|opt)/", path.read_text(encoding="utf-8"))
        assert match is None, f"{path.name}: {match}"


STEPS = 400


@pytest.fixture
def no_other_objects():
    """The collector leaves aside what tests before made too, from now on: seconds in a process of many tests."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("no_other_objects")
@pytest.mark.parametrize(
    "leak",
    [lambda number: torch.zeros(1), lambda number: f"{number} passed", lambda number: [number]],
    ids=["a tensor of one number", "a text", "a list"],
)
def test_what_each_step_keeps_is_seen(leak):
    kept = []
    assert not memory.growth(lambda number: kept.append(leak(number)), STEPS)["held"]


@pytest.mark.usefixtures("no_other_objects")
def test_a_cache_that_is_full_and_what_is_freed_are_not_growth():
    cache = {}
    growth = memory.growth(lambda number: cache.setdefault(number % 4, torch.ones(number % 4, 1000)), STEPS)
    assert growth["held"], growth
    assert memory.growth(lambda number: torch.ones(2**20).sum(), STEPS)["held"]


def test_bytes_of_malloc_are_counted():
    before = memory.allocated()
    kept = torch.ones(2**18)  # 1 MiB
    assert memory.allocated() - before == pytest.approx(kept.nbytes, abs=2**14)
    del kept
    assert memory.allocated() - before == pytest.approx(0, abs=2**14)


@pytest.mark.usefixtures("no_other_objects")
def test_a_tensor_kept_by_every_pass_or_patch_is_seen(monkeypatch):
    kept = []
    whole = memory.ids_of
    monkeypatch.setattr(memory, "LONGEST_PASS", 3)
    monkeypatch.setattr(memory, "ids_of", lambda *of: kept.append(torch.zeros(1)) or whole(*of))
    assert not memory.passes("BERT, clustered", 60)["held"]
    monkeypatch.setattr(memory, "patch", lambda model, method: kept.append(torch.zeros(1)))
    monkeypatch.setattr(hf_effattn, "unpatch_attention", lambda model: None)
    assert not memory.patches("BERT, clustered", 60)["held"]


def test_the_power_of_a_line_is_one():
    assert memory.slope({16: 100, 64: 400}) == pytest.approx(1.0)
    assert memory.slope({16: 100, 64: 1600}) == pytest.approx(2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_runs_by_its_method(kind):
    model = tiny(kind, 70)
    with torch.no_grad():
        output = model(ids_of(70))[0]
        assert output.isfinite().all()
        if KINDS[kind][1] is not None:
            assert not torch.allclose(output, tiny(kind, 70, patched=False)(ids_of(70))[0], atol=1e-6)


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return faults.Trials(tmp_path_factory.mktemp("trials"))


def test_damage_is_refused_told_of_or_unseen(trials):
    drawn = random.Random(0)
    verdict, detail = faults.cut_short(trials, drawn)
    assert verdict == "survived"
    assert "refused: SafetensorError" in detail
    assert faults.damaged(trials, lambda content: "nothing") == ("survived", "nothing; loaded whole")
    assert faults.flipped(False, trials, drawn)[0] == "unseen"  # no file says what its numbers were

    def rename(content):
        content[:] = content.replace(b"word_embeddings", b"word_embeddingz")
        return "a name"

    assert faults.damaged(trials, rename) == ("survived", "a name; told of: missing_keys, unexpected_keys")


def test_a_folder_that_was_being_saved_loads_whole_or_not_at_all(trials, tmp_path):
    trials.save(tmp_path / "whole")()
    expected = faults.result_of("saving", tmp_path / "whole")["weights"]
    assert faults.verdict_of_loading(tmp_path / "whole", expected, "") == ("survived", "; loaded")
    assert faults.verdict_of_loading(tmp_path / "whole", "another", "")[0] == "failed"
    next((tmp_path / "whole").glob("*-00003-of-*.safetensors")).unlink()
    assert faults.verdict_of_loading(tmp_path / "whole", expected, "")[0] == "survived"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["kill: training", "kill: embedding", "kill: tuning", "full disk: training", "loss that is no number"]
)
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(fault, trials):
    (row,) = faults.verdicts(fault, [0], trials)
    assert row["verdict"] == "survived", row


@pytest.mark.slow
def test_a_corpus_has_the_same_vectors_by_two_processes_of_which_one_is_killed(tmp_path):
    corpus = corpora.save_corpus(tmp_path, 12, 300)
    lengths = [len(json.loads(line)["text"].split()) for line in corpus[1].read_text().splitlines()]
    assert 100 <= min(lengths) < max(lengths) <= 300
    whole = corpora.run_once(corpus, tmp_path / "one", processes=1, threads=1, kills=0, expected=0.0)
    killed = corpora.run_once(corpus, tmp_path / "two", processes=2, threads=1, kills=1, expected=whole["seconds"])
    assert (whole["killed"], killed["killed"]) == (0, 1)
    assert killed["result"] == whole["result"]


def test_missing_modules_of_transformers_tests_get_empty_classes(tmp_path):
    (tmp_path / "test_common.py").write_text("from .there import a\nfrom .gone.deep import B, C\nimport os\n")
    (tmp_path / "there.py").write_text("from .also_gone import D\na = 1\n")
    versions.add_stubs(tmp_path, tmp_path / "test_common.py")
    assert (tmp_path / "gone" / "deep.py").read_text() == "class B:\n    pass\n\n\nclass C:\n    pass\n"
    assert (tmp_path / "gone" / "__init__.py").exists()
    assert "class D" in (tmp_path / "also_gone.py").read_text()


def test_an_exception_is_of_a_test_and_may_be_of_a_version(monkeypatch):
    listed = [
        {"suites": ["A"], "tests": ["test_x*"]},
        {"suites": ["A", "B"], "tests": ["test_y"], "transformers": ["5.0.0"]},
    ]
    monkeypatch.setattr(versions, "exceptions", lambda: listed)
    assert versions.excepted("TestA::test_x_1", "5.23.0")
    assert not versions.excepted("TestB::test_x_1", "5.23.0")
    assert versions.excepted("TestB::test_y", "5.0.0")
    assert not versions.excepted("TestB::test_y", "5.23.0")
    endings = {"TestA::test_x_1": "failed", "TestA::test_x_2": "passed", "TestA::test_x_3": "skipped"}
    endings |= {"TestB::test_z": "passed", "TestB::test_failed": "failed"}
    assert versions.judged(endings, "5.0.0") == {
        "passed": 1,
        "skipped": 1,
        "excepted": 1,
        "failed": ["TestB::test_failed"],
        "passed_but_excepted": ["TestA::test_x_2"],
    }


def test_a_run_of_pytest_says_what_became_of_each_test(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "CACHE", tmp_path)
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\nclass TestA:\n    def test_good(self): pass\n    def test_bad(self): assert 0\n"
        "    def test_skipped(self): pytest.skip()\n"
    )
    endings = versions.outcomes(Path(sys.executable), [str(tmp_path / "test_some.py")], [])
    assert endings == {"TestA::test_good": "passed", "TestA::test_bad": "failed", "TestA::test_skipped": "skipped"}


def test_every_exception_has_its_reason():
    for exception in versions.exceptions():
        assert exception["tests"]
        assert set(exception["suites"]) <= {*versions.SUITES, *versions.GROUPS}
        assert len(exception["reason"]) > 10


def test_an_exception_of_all_decoders_is_one_of_each():
    assert versions.excepted("TestQwen3Moe::test_attention_outputs", "5.23.0")
    assert not versions.excepted("TestCST::test_attention_outputs", "5.23.0")


def test_older_versions_lack_models():
    newest, oldest = versions.PINNED, versions.Versions("3.11", "2.13.0", "5.15.1")
    assert versions.suites_of(newest) == list(versions.SUITES)
    assert set(versions.SUITES) - set(versions.suites_of(oldest)) == {*versions.NEWER, "compatibility"}


def test_the_table_of_versions_names_failures_and_what_did_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(reliability_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(reliability_tables, "TRIED", versions.TRIED[:2])
    first, second = versions.TRIED[:2]
    counts = {"passed": 5, "excepted": 1}
    rows = [
        {"versions": first.name, "suite": suite, **counts, "failed": [], "passed_but_excepted": []}
        for suite in versions.SUITES[:-1]
    ]
    rows[0] |= {"failed": ["TestA::test_bad"], "passed_but_excepted": ["TestA::test_good"]}
    (tmp_path / "versions.json").write_text(json.dumps({"rows": rows}))
    table = reliability_tables.versions()
    others = len(rows) - 2  # beside two suites of ours
    assert f"| {first.name} | 10 | {others} | {5 * others} | {others} | 2 |" in table
    assert f"Failed: `TestA::test_bad` ({first.name}), `TestA::test_good` passed ({first.name})." in table
    assert f"Not run here: {first.name} ({versions.SUITES[-1]}); {second.name}." in table


def test_versions_from_the_oldest_to_the_newest_that_the_readme_names_are_tried_and_pass():
    """pyproject.toml allowed 5.0, of which 103 tests failed."""
    root = versions.ROOT
    allowed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    oldest = next(need for need in allowed if need.startswith("transformers")).removeprefix("transformers>=")
    rows = json.loads((root / "scripts/results/versions.json").read_text(encoding="utf-8"))["rows"]
    ran = sorted({row["transformers"] for row in rows}, key=reliability_tables.numbers_in)
    assert ran == sorted({tried.transformers for tried in versions.TRIED}, key=reliability_tables.numbers_in)
    assert ran[0] == f"{oldest}.0"
    assert f"transformers {oldest} to {ran[-1].removesuffix('.0')}" in (root / "README.md").read_text("utf-8")
    assert all(row["failed"] == row["passed_but_excepted"] == [] for row in rows)


def test_rows_of_versions_that_are_no_longer_allowed_go_with_the_next_run(tmp_path, monkeypatch):
    names = ("python 3.11, torch 2.6.0, transformers 5.7.0", "python 3.11, torch 2.5.1, transformers 5.7.0")
    names += ("python 3.11, torch 2.13.0, transformers 5.6.9", "python 3.10, torch 2.13.0, transformers 5.23.0")
    numbers = [dict(part.split() for part in name.split(", ")) for name in names]
    rows = [{"versions": name, "suite": "Bert"} | fields for name, fields in zip(names, numbers, strict=True)]
    (tmp_path / "versions.json").write_text(json.dumps({"rows": rows, "settings": {}}))
    monkeypatch.setattr(versions, "try_suite", lambda *arguments: {"passed": 1})
    versions.main(in_this=True, only="ViT", output=tmp_path / "versions.json")
    remaining = json.loads((tmp_path / "versions.json").read_text())["rows"]
    assert [(row["versions"], row["suite"]) for row in remaining] == [
        (names[0], "Bert"),
        (versions.here()[0].name, "ViT"),
    ]


def test_a_table_without_results_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(reliability_tables, "RESULTS", tmp_path)
    assert "| Not run to its end yet: `make faults`. |" in reliability_tables.verdicts()
