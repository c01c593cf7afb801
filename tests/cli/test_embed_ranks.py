"""`effattn embed` by several processes: the bits of one process, whichever of them are killed, and when."""

import os
import subprocess
import sys
import time
from functools import partial

import pytest
from support.embedding_cases import save_documents, save_encoder
from typer.testing import CliRunner

from hf_effattn.cli import app
from hf_effattn.embedding import kept, run
from scripts.reliability._children import FORK, Child

runner = CliRunner()
LONGEST_WAIT_SECONDS = 120
OPTIONS = ["--batch-tokens", "64"]
RESULT = ("vectors.npy", "ids.jsonl", "skipped.jsonl")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A model and 60 documents, in some 40 batches; a quarter is longer than the model takes, and cut."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = save_documents(folder / "documents", [1 + 7 * n % 80 for n in range(60)])
    (documents / "empty.txt").touch()
    return [str(save_encoder(folder / "encoder")), str(documents), "--max-length", "64", *OPTIONS]


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """The files of an unbroken run of one process."""
    output = tmp_path_factory.mktemp("whole") / "out"
    assert embed(arguments, output).exit_code == 0
    return result_of(output)


@pytest.fixture(autouse=True)
def several_pieces_of_counting(monkeypatch):
    monkeypatch.setattr(run, "COUNTED_BYTES", 2000)


def environment_of(rank, ranks):
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}


def embed(arguments, output, rank=0, ranks=1):
    """In this process."""
    return runner.invoke(app, ["embed", *arguments, "--output", str(output)], env=environment_of(rank, ranks))


@pytest.fixture
def begin():
    """Begin a rank in a process that is forked from this one: starts and imports are nine tenths of a run's time.

    No process outlives its test.
    """
    begun = []

    def begin_rank(arguments, output, rank, ranks, before=lambda: None):
        def call():
            os.environ |= environment_of(rank, ranks)
            before()
            app(["embed", *arguments, "--output", str(output)], standalone_mode=False)

        said = output.with_name(f"{output.name}-said-{rank}")
        said.touch()
        begun.append(Child(call, said))
        return begun[-1]

    yield begin_rank
    for child in begun:
        child.kill(after=0)


def result_of(output):
    assert {path.name for path in output.iterdir()} == {*RESULT, "embed.json", ".lock"}
    return {name: (output / name).read_bytes() for name in RESULT}


def await_shards(output, number, children):
    """Wait for some vectors, not for all."""
    begun = time.monotonic()
    while sum(1 for path in output.glob("shards/vectors-*/*") if path.name.isdigit()) < number:
        assert all(child.process.is_alive() for child in children), [child.said.read_text() for child in children]
        assert time.monotonic() - begun < LONGEST_WAIT_SECONDS
        time.sleep(0.001)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_work_and_the_result_is_that_of_one(ranks, begin, arguments, whole, tmp_path):
    together = FORK.Barrier(ranks)

    def meet_and_count():
        begin_batches, add = run._Run._embed, kept.Shards.add

        def met(*of):
            together.wait(LONGEST_WAIT_SECONDS)
            return begin_batches(*of)

        def counted(self, index, write):
            print(f"adds to {self._path.name.partition('-')[0]}", flush=True)
            add(self, index, write)

        run._Run._embed, kept.Shards.add = met, counted

    output = tmp_path / "out"
    children = [begin(arguments, output, rank, ranks, meet_and_count) for rank in range(ranks)]
    for child in children:
        child.result(LONGEST_WAIT_SECONDS)
    assert result_of(output) == whole
    said = [child.said.read_text() for child in children]
    added = [words.count("adds to vectors") for words in said]
    assert min(added) > max(added) / 4, added
    assert f"on cpu in {ranks} processes." in said[0]
    assert "60/60 documents" in said[0]
    assert "written: " in said[0]
    assert "1 document skipped" in said[0]
    for words in said[1:]:
        assert {line for line in words.splitlines() if not line.startswith("adds to")} == set()


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_finish_what_a_killed_rank_left(killed, begin, arguments, whole, tmp_path):
    output = tmp_path / "out"
    children = [begin(arguments, output, rank, 2) for rank in range(2)]
    await_shards(output, 5, children)
    assert children[killed].kill(after=0)
    children[1 - killed].result(LONGEST_WAIT_SECONDS)
    if killed == 0:  # which alone writes the result
        assert not (output / "vectors.npy").exists()
        result = embed(arguments, output)  # of one process now
        assert result.exit_code == 0, result.output
        assert "Going on" in result.stderr
        assert "Timing" not in result.stderr  # nothing was left to do
    assert result_of(output) == whole


def test_a_killed_run_goes_on_with_another_number_of_processes(begin, arguments, whole, tmp_path):
    output = tmp_path / "out"
    children = [begin(arguments, output, rank, 3) for rank in range(3)]
    await_shards(output, 5, children)
    assert [child.kill(after=0) for child in children].count(True) > 0
    assert not (output / "vectors.npy").exists()
    left = {path: path.stat().st_mtime_ns for path in output.glob("shards/vectors-*/*") if path.name.isdigit()}
    children = [begin(arguments, output, rank, 2, stop_at_the_end) for rank in range(2)]
    for child in children:
        child.process.join(LONGEST_WAIT_SECONDS)
    assert {path: path.stat().st_mtime_ns for path in left} == left  # none was computed again
    assert embed(arguments, output).exit_code == 0
    assert result_of(output) == whole


def begin_and_lose_vectors(begin, arguments, output):
    """The manifest of a run that has all vectors to make."""
    child = begin(arguments, output, 0, 2, stop_at_the_end)
    child.process.join(LONGEST_WAIT_SECONDS)
    delete_shards(output)


def delete_shards(output):
    """But not their folders: as a deletion that is under way."""
    for path in output.glob("shards/vectors-*/*"):
        path.unlink()


def stop_at_the_end():
    """Before the shards are deleted."""

    def stop(*of):
        raise KeyboardInterrupt

    kept.RunFolder.put_together = stop


def test_a_rank_waits_for_rank_0_and_says_so(begin, arguments, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SILENT_SECONDS", 0.0)
    output = tmp_path / "out"
    waiting = begin(arguments, output, 1, 2)
    begun = time.monotonic()
    while "Rank 1 waits for rank 0" not in waiting.said.read_text():
        assert waiting.process.is_alive(), waiting.said.read_text()
        assert time.monotonic() - begun < LONGEST_WAIT_SECONDS
        time.sleep(0.01)
    assert list(output.glob("shards/counts-*/*"))  # it has done what needs no choice
    result = embed(arguments, output, 0, 2)
    assert result.exit_code == 0, result.output
    waiting.result(LONGEST_WAIT_SECONDS)
    assert result_of(output) == whole


@pytest.mark.parametrize("moment", ["_count", "_timed", "_await_begin"])
def test_a_rank_that_is_late_leaves_a_finished_run_as_it_is(moment, begin, arguments, whole, tmp_path, monkeypatch):
    """Rank 0 finishes all, while rank 1 is about to do something."""
    output, do = tmp_path / "out", getattr(run._Run, moment)

    def late(self, *of, **how):
        if not self.rank.leads and not (output / "vectors.npy").exists():
            assert embed(arguments, output, 0, 2).exit_code == 0
        return do(self, *of, **how)

    monkeypatch.setattr(run._Run, moment, late)
    if moment == "_timed":
        begin_and_lose_vectors(begin, arguments, output)
    result = embed(arguments, output, 1, 2)
    assert result.exit_code == 0, result.output
    assert result_of(output) == whole
    assert embed(arguments, output, 1, 2).output == ""


def test_a_rank_makes_nothing_again_while_shards_are_deleted(begin, arguments, whole, tmp_path, monkeypatch):
    output, prepare, clean, add = tmp_path / "out", run._Run._prepare, kept.RunFolder.clean, kept.Shards.add
    begin_and_lose_vectors(begin, arguments, output)
    added = []

    def late(self, *of):
        if not self.rank.leads:
            monkeypatch.setattr(kept.RunFolder, "clean", lambda folder: delete_shards(folder.path))
            assert embed(arguments, output, 0, 2).exit_code == 0
            monkeypatch.setattr(kept.RunFolder, "clean", clean)
            added.clear()
        prepare(self, *of)

    monkeypatch.setattr(run._Run, "_prepare", late)
    monkeypatch.setattr(kept.Shards, "add", lambda self, *of: added.append(self) or add(self, *of))
    assert embed(arguments, output, 1, 2).exit_code == 0
    assert len(added) <= len(run.TIMED_AT)
    assert result_of(output) == whole


def test_rank_0_alone_measures_which_method_is_the_fastest(begin, arguments, tmp_path, monkeypatch):
    settings = {"method": "clustered", "clusters": 6, "min_length": 0}
    monkeypatch.setattr(run, "is_long_enough", lambda length, model: True)

    def choose_as(rank):
        def measured(*of):
            assert rank == 0
            return {**settings, "hidden_error": 0.05}

        run.fastest_method = measured

    output = tmp_path / "out"
    children = [
        begin([*arguments, "--max-error", "0.1"], output, rank, 2, partial(choose_as, rank)) for rank in (0, 1)
    ]
    for child in children:
        child.result(LONGEST_WAIT_SECONDS)
    method = "clustered clusters=6 min_length=0"
    assert embed([*arguments, "--method", method], tmp_path / "named").exit_code == 0
    assert result_of(output) == result_of(tmp_path / "named")


def test_ranks_with_other_options_or_numbers_are_refused_in_words(begin, arguments, tmp_path):
    output = tmp_path / "out"
    child = begin(arguments, output, 0, 2, stop_at_the_end)
    child.process.join(LONGEST_WAIT_SECONDS)
    result = embed([*arguments, "--pooling", "cls"], output, 1, 2)
    assert result.exit_code == 1
    assert "begun with something else (pooling: None, now cls;" in " ".join(result.output.split())
    result = embed(arguments, output, 2, 2)
    assert result.exit_code == 1
    assert "RANK must be from 0 to WORLD_SIZE - 1, got RANK=2, WORLD_SIZE=2" in " ".join(result.output.split())


@pytest.mark.compatibility("accelerate", "`accelerate launch` and `torchrun` of `effattn embed`", "runs")
@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        # On a CPU too; its --cpu starts one process.
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers_start_the_ranks(launcher, arguments, whole, tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, "-m", *launcher, "-m", "hf_effattn", "embed", *arguments, "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_WAIT_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on cpu in 2 processes." in done.stderr
    assert result_of(output) == whole
