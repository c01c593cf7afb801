"""What is launched again with other addresses computes what the function would: under Triton's interpreter.

Launches get addresses, as a GPU's do, and the kernels run on the memory that is there.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from support import attention_cases, causal_cases
from support.gpu_autocast import autocast_of_a_gpu
from support.op_cases import CAUSAL, CLUSTERED, DEVICE, OPS, SLICES, each, to_dtype, with_gradients
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from hf_effattn.ops import cluster_queries, kmeans, query_residuals
from hf_effattn.ops.shared.triton import recorded
from hf_effattn.ops.shared.triton.recorded import packed

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU every test of the kernels runs what is recorded")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """The workspace holds NaN; other empty tensors stay as they are, since filling them would be recorded."""
    empty = torch.empty

    def made(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(255) if tensor.dtype == torch.uint8 else tensor

    monkeypatch.setattr(torch, "empty", made)


class OnMemory:
    """Stands for a compiled kernel: interprets it on the tensors that are at some addresses."""

    function, packed_metadata = None, ()

    def __init__(self, launch, arguments):
        self.launch = launch
        self.dtypes = {i: x.dtype for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)}

    def run(self, x, y, z, stream, function, metadata, launched, enter, leave, *arguments):
        given = [self.at(x, self.dtypes[i]) if i in self.dtypes else x for i, x in enumerate(arguments)]
        self.launch(given, (x, y, z))

    @staticmethod
    def at(address, dtype):
        memory = (ctypes.c_byte * dtype.itemsize).from_address(address)
        return torch.frombuffer(memory, dtype=dtype) if address else torch.empty(0, dtype=dtype)


@pytest.fixture
def replays(monkeypatch):
    """Recording is on; a list of what was replayed."""
    interpret = InterpretedFunction.run

    def run(self, *args, grid, warmup, **named):
        if 0 in grid:
            return
        with _disable_current_modes():  # the interpreter computes with torch, too
            interpret(self, *args, grid=grid, warmup=warmup, **named)
        if (now := recorded.recorder()) is not None:
            arguments = [*args, *(named[name] for name in self.arg_names[len(args) :])]

            def launch(given, grid):
                interpret(self, *given, grid=grid, warmup=False)

            now.launched(OnMemory(launch, arguments), grid, arguments)

    made = []
    replay = recorded.Recording.replay
    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(recorded, "RECORDS", True)
    driver = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(recorded, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(
        recorded.Recording, "replay", lambda self, inputs: (made.append(self), replay(self, inputs))[1]
    )
    return made


def assert_replayed(call, replays, monkeypatch, times):
    """The third call, of other numbers, gives what it gives without recordings; so many replays were made in it."""
    for draw in (0, 1):
        call(draw)
    replays.clear()
    actual = call(2)
    assert len(replays) == times
    monkeypatch.setattr(recorded, "RECORDS", False)
    expected = call(2)
    assert len(replays) == times
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


CASES = {
    CLUSTERED[0].name: attention_cases.Case("few", B=1, H=2, key_heads=1, N=40, M=32, D=16, clusters=3),
    CLUSTERED[1].name: attention_cases.Case("few", B=1, H=2, N=40, M=32, D=16, clusters=3, topk=4, masks="holes"),
    CLUSTERED[2].name: attention_cases.Case("few", B=1, H=2, key_heads=1, N=40, M=32, D=16, clusters=3, topk=4),
    **{
        op.name: causal_cases.Case("small", B=1, H=2, key_heads=1, N=21, D=8, Dv=8, segment_length=8, window=8)
        for op in CAUSAL
    },
}


@each(OPS, lambda op: [CASES.get(op.name, op.kernel_cases[0])], lambda op, case: op not in CAUSAL[:2])
def test_an_op_and_its_gradients(op, case, replays, monkeypatch):
    def call(draw):
        inputs = to_dtype(op.make(case, torch.float32, draw), torch.float32)
        return with_gradients(op, case, inputs, backend="triton")

    assert_replayed(call, replays, monkeypatch, times=2)


@each(
    (CLUSTERED[0], CLUSTERED[2], CAUSAL[2], SLICES),
    lambda op: [CASES.get(op.name, op.kernel_cases[0])],
    lambda op, case: op in (CLUSTERED[0], SLICES),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["single", "half"])
def test_what_is_replayed_under_autocast_computes_as_recorded(op, case, dtype, replays):
    """Torch's ops in it, too, which autocast would multiply, or add up, in another dtype."""
    inputs = to_dtype(op.make(case, torch.float32, 0), dtype)
    expected = with_gradients(op, case, inputs, backend="triton")
    replays.clear()
    with autocast_of_a_gpu(), torch.autocast("cpu", torch.bfloat16):
        actual = with_gradients(op, case, inputs, backend="triton")
    assert len(replays) == 2
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


TRITON = {"backend": "triton"}
CLUSTERINGS = {
    "kmeans": lambda q, k, labels, mask: kmeans(q[0], 5, mask=None if mask is None else mask.expand(2, -1), **TRITON)[
        0
    ],
    "queries": lambda q, k, labels, mask: cluster_queries(q, 5, key=k, key_mask=mask, query_mask=mask, **TRITON),
    "lsh": lambda q, k, labels, mask: cluster_queries(q, 5, method="lsh", **TRITON),
    "residuals": lambda q, k, labels, mask: query_residuals(q, labels, 5, query_mask=mask, **TRITON)[0],
}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "holes"])
@pytest.mark.parametrize("name", CLUSTERINGS)
def test_a_clustering(name, masked, replays, monkeypatch):
    def call(draw):
        generator = torch.Generator().manual_seed(draw)
        query, key = torch.randn(2, 1, 2, 40, 16, generator=generator)
        labels = torch.randint(5, (1, 2, 40), generator=generator)
        mask = torch.rand(1, 40, generator=generator) < 0.8 if masked else None
        return {"output": CLUSTERINGS[name](query, key, labels, mask)}

    assert_replayed(call, replays, monkeypatch, times=1)


def test_kinds_of_arguments_are_told_apart(replays):
    @recorded.recorded
    def double(x, factor):
        return x * factor

    wide = torch.arange(64.0)
    kinds = [(wide, 2.0), (wide, 3.0), (wide, 2), (wide[1:], 2.0), (wide[::2], 2.0), (wide.half(), 2.0)]
    kinds += [(wide.view(8, 8), 2.0), (wide, True), (wide[:32], 2.0), (wide[1:33], 2.0)]
    for x, factor in kinds:
        assert torch.equal(double(x, factor), x * factor)
    assert not replays
    for x, factor in kinds:
        assert torch.equal(double(x, factor), x * factor)
    assert len(replays) == len(kinds)


def test_tensors_in_one_place_are_told_from_those_in_two(replays):
    @recorded.recorded
    def difference(x, y):
        return x - 2 * y

    x, y = torch.randn(2, 16).unbind()
    x, y = x.clone(), y.clone()
    for left, right in 2 * [(x, x), (x, y), (y, x)]:
        assert torch.equal(difference(left, right), left - 2 * right)
    assert len(replays) == 4  # (y, x) is like (x, y)


def test_what_depends_on_numbers_is_not_recorded(replays):
    @recorded.recorded
    def positive(x):
        return x + 1 if x.sum() > 0 else x - 1

    @recorded.recorded
    def chosen(x):
        return x[x > 0] * 1

    for sign in (1, 1, -1):
        x = sign * torch.ones(4)
        assert torch.equal(positive(x), x + sign)
        assert torch.equal(chosen(x), x[x > 0])
    assert not replays


def test_parts_of_arguments_that_share_memory_are_not_recorded(replays):
    """Where their distance is another one, the part is elsewhere."""

    def function(x, y):
        return x[4:] + y[4:]

    memory = torch.arange(32.0)
    last = recorded.recorded(function)
    for begin in (8, 8, 12):
        x, y = memory[:8], memory[begin : begin + 8]
        assert torch.equal(last(x, y), x[4:] + y[4:])
    assert not replays
    last = recorded.recorded(function)
    for y in (torch.ones(8), torch.zeros(8)):
        assert torch.equal(last(memory[:8], y), memory[4:8] + y[4:])
    assert len(replays) == 1


def test_a_call_that_failed_is_recorded_the_next_time(replays):
    fails = [True]

    @recorded.recorded
    def late(x):
        if fails[0]:
            raise RuntimeError("out of memory")
        return x + 1

    with pytest.raises(RuntimeError, match="out of memory"):
        late(torch.ones(4))
    fails[0] = False
    for _ in range(2):
        assert torch.equal(late(torch.ones(4)), 2 * torch.ones(4))
    assert len(replays) == 1


def test_lengths_that_come_once_do_not_fill_the_memory(replays, monkeypatch):
    monkeypatch.setattr(recorded, "MOST", 8)

    @recorded.recorded
    def increased(x):
        return x + 1

    for length in range(1, 30):
        assert len(increased(torch.ones(length))) == length
    (recordings,) = (cell.cell_contents for cell in increased.__closure__ if isinstance(cell.cell_contents, dict))
    assert 0 < len(recordings) <= 8


def test_another_thread_may_throw_recordings_away(replays):
    @recorded.recorded
    def increased(x, number):
        return x + number

    (recordings,) = (cell.cell_contents for cell in increased.__closure__ if isinstance(cell.cell_contents, dict))

    class Number(int):
        """Stands for a thread that comes between every two looks at the recordings."""

        looks = 0

        def __hash__(self):
            Number.looks += 1
            if Number.looks % 2 == 0:
                recordings.clear()
            return 1

    for _ in range(4):
        assert torch.equal(increased(torch.ones(2), Number(1)), torch.full((2,), 2.0))


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_what_hears_of_launches_hears_of_all(hook, replays, monkeypatch):
    @recorded.recorded
    def increased(x):
        return x + 1

    increased(torch.ones(4))
    monkeypatch.setattr(recorded.knobs.runtime, hook, lambda *_: None)
    increased(torch.ones(4))
    assert not replays


def test_tensors_of_one_time_lie_apart_in_the_workspace():
    generator = torch.Generator().manual_seed(0)
    intervals = []
    for first, more, size in torch.randint(20, (60, 3), generator=generator).tolist():
        intervals.append((first, first + more, 1 + 300 * size))
    offsets, total = packed(intervals)
    assert total < sum(size for *_, size in intervals) * 0.8
    places = [
        (first, last, offset, offset + size) for (first, last, size), offset in zip(intervals, offsets, strict=True)
    ]
    for i, (first, last, begin, end) in enumerate(places):
        assert begin % recorded.ALIGNMENT == 0
        assert end <= total
        for other_first, other_last, other_begin, other_end in places[:i]:
            same_time = first <= other_last and other_first <= last
            assert not (same_time and begin < other_end and other_begin < end)
