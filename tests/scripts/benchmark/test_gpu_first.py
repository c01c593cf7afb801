"""The first look at a GPU, rehearsed without one: steps and budgets, what is counted, and what follows from it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import typer

from hf_effattn.ops.shared.triton import launch
from scripts.benchmark import _budgets, _gpu_kernels, _gpu_processes, gpu_first
from scripts.benchmark._budgets import DeviceLostError, OutOfTimeError, Step, last_rows, run_steps, within
from scripts.benchmark._gpu_decisions import decisions
from scripts.benchmark._gpu_kernels import Event
from scripts.benchmark._gpu_layers import ENCODER, Setup, rehearsal, runs, warm_ups
from scripts.shared.runs import KeptRuns

ROOT = Path(gpu_first.__file__).parents[2]
IN_PROCESSES = ("tests",)


def wait_for_ever(found):
    found["before"] = 1
    while True:
        try:
            time.sleep(1)
        except Exception:
            found["swallowed"] = True


def fails(found):
    found["before"] = 2
    raise ValueError("first line\nsecond line")


def works(found):
    found["value"] = float("nan")


@pytest.fixture
def file(tmp_path):
    return KeptRuns(tmp_path / "first.json", {})


def run(file, *steps, again=(), healthy=lambda: True, end=None, grace=10.0):
    end = time.monotonic() + 100 if end is None else end
    return run_steps(steps, file, end, healthy, {"code": "x"}, again, grace)


def test_a_step_that_overruns_or_fails_is_kept_and_the_next_one_runs(file):
    assert run(file, Step("slow", 0.2, wait_for_ever), Step("wrong", 5, fails), Step("right", 5, works)) == []
    rows = last_rows(json.loads(file.path.read_text())["rows"])
    assert {name: row["status"] for name, row in rows.items()} == {
        "slow": "overran", "wrong": "failed", "right": "done",
    }  # fmt: skip
    assert rows["slow"]["found"] == {"before": 1}
    assert 0.2 <= rows["slow"]["seconds"] < 2
    assert rows["wrong"]["found"] == {"before": 2}
    assert rows["wrong"]["error"] == "ValueError: first line"
    assert "test_gpu_first.py" in rows["wrong"]["where"]
    assert rows["right"]["found"] == {"value": None}
    assert rows["right"]["code"] == "x"


def test_what_is_kept_is_not_measured_again_unless_asked(file):
    counts = []
    step, other = (Step(name, 5, lambda found, name=name: counts.append(name)) for name in ("one", "two"))
    run(file, step, other)
    run(KeptRuns(file.path, {}), step, other)
    assert counts == ["one", "two"]
    run(file, step, other, again=["two"])
    assert counts == ["one", "two", "two"]
    # Killed within it, a step would end the next process as well; stopped by hand it would not.
    file.add({"step": "died", "status": _budgets.BEGUN}, {"step": "stopped", "status": _budgets.INTERRUPTED})
    run(file, *(Step(name, 5, lambda found, name=name: counts.append(name)) for name in ("died", "stopped")))
    assert counts == ["one", "two", "two", "stopped"]


def test_a_step_stopped_by_hand_says_so(file):
    def stopped(found):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(file, Step("one", 5, stopped))
    assert [row["status"] for row in file.rows] == ["begun", "interrupted"]


def test_a_step_that_would_end_too_late_is_not_begun(file):
    assert run(file, Step("long", 50, works), Step("short", 1, works), end=time.monotonic() + 20) == ["long"]
    assert set(last_rows(file.rows)) == {"short"}


def test_a_device_that_answers_no_more_ends_the_process(file):
    with pytest.raises(DeviceLostError, match="wrong"):
        run(file, Step("wrong", 5, fails), Step("next", 5, works), healthy=lambda: False)
    assert set(last_rows(file.rows)) == {"wrong"}


def test_a_step_that_hears_no_alarm_ends_the_process(file, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)

    def deaf(found):
        found["before"] = 1
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        try:
            time.sleep(0.6)
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})

    run(file, Step("deaf", 0.1, deaf), grace=0.1)
    assert left == [_budgets.RESTART]
    assert [row["status"] for row in file.rows[:2]] == ["begun", "hung"]
    assert file.rows[1]["found"] == {"before": 1}


def test_an_alarm_leaves_no_trace():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTimeError):
        within(0.05, lambda: time.sleep(5))
    within(5, lambda: None)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_all_budgets_fit_into_seven_minutes():
    assert sum(seconds for seconds, _ in gpu_first.STEPS.values()) <= gpu_first.SECONDS <= 420 - 25


@pytest.mark.slow
def test_a_rehearsal_goes_through_the_steps_and_on_where_it_stopped(tmp_path, capsys):
    output = tmp_path / "rehearsal.json"
    chosen = [name for name in gpu_first.STEPS if name not in IN_PROCESSES]
    gpu_first.main(output, steps=",".join(chosen[:3]), rehearse=True)
    first = json.loads(output.read_text())["rows"]
    gpu_first.main(output, steps=",".join(chosen), rehearse=True)
    rows = json.loads(output.read_text())["rows"]
    assert rows[: len(first)] == first
    assert [row["step"] for row in rows if row["status"] == "begun"] == chosen
    found = {row["step"]: row["found"] for row in rows if row["status"] == "done"}
    assert list(found) == chosen
    assert found["launches"]["45 arguments"]["ways"]["replayed"]["host_us"] > 0
    assert "interpreter" in found["launches"]["45 arguments"]["absent"]["compiled.run"]
    for name in ENCODER:
        assert found["durations"][name]["256"]["total_us"] > 0
        errors = found["layers"]["256"]["errors"][name]
        # On a CPU both are the same form, once in float32 and with more heads.
        assert 0 < errors["float64"] < 0.5
        assert errors["error"] == pytest.approx(errors["float64"], rel=0.02)
    check = found["causal"]["check"]
    assert check["sees_no_later_token"]
    assert check["error_of_first_segment"] < 1e-5 < check["error"] < 0.5
    assert {"clustered", "i-clustered", "bi-clustered"} == set(found["crossovers"]["crossover"])
    gpu_first.main(read=output)
    said = capsys.readouterr().out
    assert said.count("A rehearsal on a CPU") == 3
    assert "kernels right" in said
    assert "Not whole" not in said
    # Of another code nothing counts.
    other = [row | {"code": "other"} for row in rows]
    output.write_text(json.dumps(json.loads(output.read_text()) | {"rows": other}))
    gpu_first.main(output, steps="machine", rehearse=True)
    assert [row["step"] for row in json.loads(output.read_text())["rows"]] == ["machine"] * 2


@pytest.mark.slow
def test_the_whole_command_without_a_gpu(tmp_path):
    """Empty kernels are compiled for an H100 and launched by each of Triton's ways; the tests asked for exist."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output = tmp_path / "rehearsal.json"
    command = [*_gpu_processes.COMMAND, "--rehearse", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = last_rows(json.loads(output.read_text())["rows"])
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(gpu_first.STEPS, "done")
    for row in (rows["launches"]["found"][f"{count} arguments"] for count in (5, 45)):
        assert list(row["ways"]) == ["kernel[grid]", "replayed", "compiled[grid]", "compiled.run"]
        assert not row["absent"]
    assert list(rows["static launcher"]["found"]["45 arguments"]["absent"]) == ["torch's static launcher"]
    assert rows["tests"]["found"]["exit"] == 0
    assert f"{len(_gpu_processes.NOT_YET_PASSED)} tests collected" in rows["tests"]["found"]["said"][0]


def test_options_that_make_no_sense(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="no GPU"):
        gpu_first.main(tmp_path / "x.json")
    with pytest.raises(typer.BadParameter, match="unknown steps"):
        gpu_first.main(tmp_path / "x.json", steps="durations,none", rehearse=True)
    with pytest.raises(typer.BadParameter, match="unknown layers"):
        gpu_first.main(warm_up="none", rehearse=True)


def test_kernels_are_compiled_in_processes_that_each_run_some_layers():
    calls = warm_ups(rehearsal())
    assert not any("," in name for name in calls)
    for name in calls:
        gpu_first.main(warm_up=name, rehearse=True)


def test_a_layer_that_did_not_run_where_it_was_compiled_is_left_out():
    setup = Setup(torch.device("cpu"))
    assert runs(setup, ENCODER[0])
    tasks = {ENCODER[0]: {"status": "failed"}, ENCODER[1]: {"status": "overran"}}
    setup.results["compile"] = {"tasks": tasks}
    assert runs(setup, ENCODER[0])  # no second process runs there at all
    tasks[ENCODER[2]] = {"status": "done"}
    assert [runs(setup, name) for name in ENCODER] == [False, True, True]


def test_processes_run_side_by_side_and_end_with_their_budget():
    found = {}
    commands = {
        "right": ["true"],
        "wrong": ["sh", "-c", "echo before; echo reason >&2; exit 3"],
        "long": ["sleep", "60"],
    }
    with pytest.raises(OutOfTimeError):
        within(1.0, lambda: _gpu_processes.side_by_side(commands, found))
    assert {name: row["status"] for name, row in found.items()} == {
        "right": "done", "wrong": "failed", "long": "overran",
    }  # fmt: skip
    assert found["wrong"]["error"] == "reason"


def test_what_pytest_and_ncu_print_is_read():
    printed = (
        "tests/gpu/test_real_sizes.py::test_one[torch.bfloat16-bi, many clusters] PASSED [ 20%]\n"
        "tests/gpu/test_real_sizes.py::test_two FAILED                            [ 40%]\n"
        "FAILED tests/gpu/test_real_sizes.py::test_two - AssertionError\n"
    )
    assert _gpu_processes.outcomes(printed) == {
        "test_one[torch.bfloat16-bi, many clusters]": "passed", "test_two": "failed",
    }  # fmt: skip
    stalled = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
    table = "\n".join(
        [
            "==PROF== Connected to process 1",
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
            f'"0","_some_kernel","{stalled}","inst","1.5"',
            f'"1","_some_kernel","{stalled}","inst","2.5"',
            '"1","_some_kernel","dram__bytes.sum","byte","1,024"',
            '"1","_other_kernel","dram__bytes.sum","byte","n/a"',
        ]
    )
    assert _gpu_kernels.counted(table) == {
        "_some_kernel": {"stalled_barrier inst": 2.0, "dram__bytes.sum byte": 1024.0}
    }


def test_kernels_are_summed_over_replays_beside_their_code():
    replay = [Event("_a", 0.0, 4.0), Event("_b", 6.0, 7.0), Event("_a", 8.0, 10.0)]
    later = [Event(name, start + 50, end + 50) for name, start, end in replay]
    row = _gpu_kernels.summary([replay, [], later], {"_a": dict.fromkeys(_gpu_kernels.SHOWN, 7)})
    assert (row["launches"], row["total_us"], row["span_us"]) == (3, 7.0, 10.0)
    first, second = row["kernels"]
    assert first == {"kernel": "_a", "calls": 2, "us": 6.0, "us_a_call": 3.0} | dict.fromkeys(_gpu_kernels.SHOWN, 7)
    assert second == {"kernel": "_b", "calls": 1, "us": 1.0, "us_a_call": 1.0}
    assert "CUPTI" in _gpu_kernels.summary([[]], {})["absent"]


def test_launches_in_a_row_have_memory_of_their_own(monkeypatch):
    """What shares memory does so among the copies, and only the last launch is given the tensors themselves."""

    def kernel_of_a_layer(x_ptr, y_ptr, n, BLOCK):
        """Never compiled here."""

    given = []
    monkeypatch.setattr(launch.Kernel, "run", lambda self, *args, grid, warmup, **named: given.append((args, named)))
    kernel = launch.Kernel(kernel_of_a_layer)
    base = torch.arange(24.0).view(2, 12)
    x, y = base[:, 2:8:2], base[1]
    names = []
    with _gpu_kernels.instead_of_launches(lambda *g, **n: _gpu_kernels.relaunch(names, *g, **n)):
        kernel[(1,)](x, y, 3, BLOCK=None)
    assert names == ["kernel_of_a_layer"]
    assert len(given) == _gpu_kernels.RELAUNCHES + 1
    assert given[-1][0][0] is x
    seen = set()
    for (a, b, n), named in given:
        assert (n, named) == (3, {"BLOCK": None})
        assert torch.equal(a, x)
        assert a.stride() == x.stride()
        seen.add(a.untyped_storage().data_ptr())
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert len(seen) == len(given)
    assert launch.Kernel.run.__name__ == "<lambda>"
    assert _gpu_kernels.launched(lambda: kernel[(1,)](x, y, 3, BLOCK=None)) == ["kernel_of_a_layer"]


def test_the_first_launch_in_a_row_is_compared_with_the_later_ones():
    each = _gpu_kernels.RELAUNCHES + 1
    times = [9.0, *[4.0] * (each - 1), 5.0, *[4.0] * (each - 1)]
    events = [Event("_a", 10.0 * i, 10.0 * i + taken) for i, taken in enumerate(times)] + [Event("copy", 0.0, 99.0)]
    row = _gpu_kernels.first_and_later(events, {"_a"})
    assert (row["first_us"], row["later_us"]) == (14.0, 8.0)
    assert row["kernels"] == [{"kernel": "_a", "calls": 2, "first_us": 14.0, "later_us": 8.0}]
    assert _gpu_kernels.first_and_later(events[:3], {"_a"})["kernels"][0]["calls"] == 0


MACHINE = {"device_name": "a GPU", "torch": "2", "code": "c", "commit": "d", "budget_seconds": 9, "seconds": 1.0}
BI = ENCODER[1]


def measured(us):
    """A file's rows where a launch takes so many microseconds of the host."""
    kernels = [{"kernel": f"_k{number}", "us": us, "calls": 1} for number, us in enumerate((500, 300, 200))]
    ways = {"replayed": {"host_us": us}, "compiled.run": {"host_us": us / 4}}
    spread = [{"kernel": f"_k{number}", "us": 10, "calls": 1} for number in range(10)]
    sdpa = {"ms": 2.4, "graph_ms": 2.25}
    duration = {"launches": 24, "ours": 14, "graph": True, "total_us": 1000, "span_us": 1084}
    found = {
        "exact": {"copy_gb_a_second": 4000, "product_tflops": 700, "sdpa": {"16384": {"SDPA": sdpa}}},
        "launches": {"others": {}, "45 arguments": {"ways": ways, "absent": {}}},
        "static launcher": {"45 arguments": {"ways": {"torch's static launcher": {"host_us": us / 8}}, "absent": {}}},
        "durations": {
            BI: {"16384": duration | {"kernels": kernels}},
            ENCODER[0]: {"16384": duration | {"kernels": spread, "total_us": 100}},
            "causal bi-clustered": {"left_out": "it did not run"},
        },
        "counters": {"absent": "ncu is not on this machine"},
        "cold code": {BI: {"16384": {"first_us": 1000, "later_us": 600, "kernels": []}}},
        "layers": {
            "16384": {
                "encoder": {"SDPA": {"graph_ms": 2.0}, BI: {"streaming_speedup": 0.7, "graph_speedup": 1.7}},
                "errors": {BI: {"error": 0.5, "float64": 0.1}},
            }
        },
        "causal": {
            "check": {"error": 0.1, "float64": 0.1, "error_of_first_segment": 0.003, "sees_no_later_token": True},
            "16384": {"SDPA": {}, "causal bi-clustered": {"graph_speedup": 2.5}},
        },
        "tests": {"asked_for": 5, "outcomes": {"one": "passed", "two": "failed"}},
        "crossovers": {"crossover": {"clustered": {"speedup": 8192}}},
    }  # fmt: skip
    return [MACHINE | {"step": name, "status": "done", "found": part} for name, part in found.items()]


def test_the_decisions_are_those_of_the_numbers():
    text = decisions(
        [*measured(40.0), MACHINE | {"step": "models", "status": "overran", "found": {}, "error": "late"}]
    )
    for said in (
        "16,384 tokens: 2.250 ms, recorded are 2.250: as before",
        "40.0 µs, 10 take 400, more than 20 each: only graphs gain",
        "Launched by torch's static launcher it takes 5.0 µs: use it",
        "launcher alone takes 10.0 µs, so Python around it can save 30.0",
        f"{BI}: 24 launches take the host 0.96 ms, less than exact attention from 16,384 tokens on",
        f"{BI}, 16,384 tokens: half of 1000 µs is in k0: mend these first",
        f"{BI}, 16,384 tokens: 4.0 times what was predicted",
        f"{ENCODER[0]}, 16,384 tokens: half of 100 µs is in k0, k1, k2, k3, k4: it is spread out",
        "at most 40% of the kernels' time: write less code",
        f"{BI}, 16,384 tokens: kernels WRONG, error 0.500, 0.100 in float64",
        f"{BI} gains without a graph at no length, in a graph at 16,384 tokens: graphs win",
        "outputs are right: error 0.100",
        "at best 2.50× as fast as exact attention (16,384 tokens, graph): keep them",
        "1 of 5 tests that had not passed on a GPU pass: mend the others first",
        "clustered, default settings: min_length 8,192 without a graph, unknown in one",
        "Not whole, so read with care: models (overran).",
        "ncu is not on this machine",
    ):
        assert said in text, said
    assert "A rehearsal" not in text
    assert "within 100: layers of few launches gain without graphs" in decisions(measured(6.0))
    assert "more than 100: save launches" in decisions(measured(15.0))


def test_make_goes_on_behind_a_process_that_a_kernel_brought_down(tmp_path):
    """`make gpu-first` starts another process after exit 75 or a signal, at most twice, and after nothing else."""
    python = tmp_path / "python"
    for statuses, expected in (("75 0", 2), ("139 75 139 0", 3), ("1 0", 1)):
        count = tmp_path / "count"
        count.write_text("")
        python.write_text(
            f"#!/bin/sh\necho x >> {count}\nset -- {statuses}\nshift $(($(wc -l < {count}) - 1))\nexit $1\n"
        )
        python.chmod(0o755)
        command = ["make", "gpu-first", f"PYTHON={python}", f"GPU_RESULTS={tmp_path}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert len(count.read_text().split()) == expected, done.stderr
        assert (done.returncode == 0) == (statuses == "75 0")
