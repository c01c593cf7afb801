"""`cuda_graph="auto"`: which calls are captured and replayed, here by a backend that runs again what it captured."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cst_conversions import convert
from support.tiny_decoders import make_model
from support.tiny_models import batch_for, encoded, tiny_model
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

import hf_effattn
from hf_effattn.measuring.candidates import make_candidates, name_settings
from hf_effattn.patching import cuda_graphs
from hf_effattn.patching.methods import Method, make_method
from hf_effattn.patching.methods.base import Options

SMALL: dict[str, Any] = {"clusters": 5, "min_length": 0}
LOCAL: dict[str, Any] = {"segment_length": 8, "window": 8, "min_length": 0}
CASES: dict[str, dict[str, Any]] = {
    "i-clustered": {"method": "i-clustered", "topk": 6} | SMALL,
    "LSH": {"method": "i-clustered", "topk": 6, "clustering": "lsh"} | SMALL,
    "bi-clustered": {"method": "bi-clustered", "topk": 6, "key_clusters": 4} | SMALL,
    "per-head": {
        "method": "per-head",
        "candidates": [{"method": "i-clustered", "topk": 3} | SMALL],
        "heads": [[0, 1]],
    },
    "cst": {"method": "cst", "slice_length": 4},
    "causal i-clustered": {"method": "i-clustered", "causal": True, "clusters": 4, "exact_keys": 6} | LOCAL,
    "causal bi-clustered": {"method": "bi-clustered", "causal": True, "exact_keys": 6, "key_clusters": 2} | LOCAL,
}
Subclass = type("Subclass", (torch.Tensor,), {})
pytestmark = pytest.mark.usefixtures("without_gradient")


class Repeating:
    """In place of `CudaBackend`: a replay runs what was captured again and writes over the output, as a graph does."""

    is_captured = False  # whether the stream is being captured by another
    error: Exception | None = None
    captured = torch.empty(0)  # what the last capture computed
    captures, replays, waits, running, most_running = 0, 0, 0, 0, 0

    def __init__(self, device: torch.device) -> None:
        self.count: Any = type(self)

    @classmethod
    def is_capturing(cls, device: torch.device) -> bool:
        return cls.is_captured

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        if self.error is not None:
            raise self.error
        self.count.captures += 1
        self.count.captured = run()
        output = run()
        return lambda: output.copy_(run()), output

    @contextmanager
    def in_order(self) -> Iterator[None]:
        self.count.running += 1
        self.count.most_running = max(self.count.most_running, self.count.running)
        yield
        self.count.running -= 1
        self.count.replays += 1

    def wait(self) -> None:
        self.count.waits += 1


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> type[Repeating]:
    kind = type("Fresh", (Repeating,), {})
    monkeypatch.setattr(cuda_graphs, "BACKENDS", {"cpu": kind})
    monkeypatch.setattr(cuda_graphs, "_devices", {})
    return kind


def tensors(seed: int = 0, length: int = 40, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, length, 8, generator=generator).to(dtype) for _ in range(3)]


def mask(shift: int = 0) -> torch.Tensor:
    return (torch.arange(40) < torch.tensor([[31], [40]])).roll(shift, 1)


def both(case: str = "i-clustered", **changes: Any) -> tuple[Method, Method]:
    """The settings with graphs and without."""
    settings = CASES[case] | changes
    return make_method(**settings, cuda_graph="auto"), make_method(**settings)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_second_call_is_captured_and_later_ones_replay_it(
    case: str, masked: bool, backend: type[Repeating]
) -> None:
    graphed, plain = both(case)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(4):
        given = tensors(seed)
        options = {"causal": bool(plain.causal), "scale": 0.4, "key_mask": mask(seed) if masked else None}
        if plain.causal:  # an input that is a parameter
            options["attention_sinks"] = torch.nn.Parameter(torch.full([2], seed / 2))
        pairs.append((graphed.run(*given, **options), plain.run(*given, **options)))
        assert (backend.captures, backend.replays) == (min(seed, 1), seed)
        assert seed != 1 or torch.equal(backend.captured, pairs[1][1])  # of the call's values, not of memory as it was
        assert all(torch.equal(*pair) for pair in zip(given, tensors(seed), strict=True))
    # Compared at the end: no replay has written to what was returned before.
    assert all(torch.equal(*pair) for pair in pairs)
    pairs[3][0].zero_()
    assert torch.equal(graphed.run(*given, **options), pairs[3][1])


OTHERS: dict[str, Callable[[Method], torch.Tensor]] = {
    "as ever": lambda method: method.run(*tensors()),
    "one text": lambda method: method.run(*(x[:1] for x in tensors())),
    "dtype": lambda method: method.run(*tensors(dtype=torch.bfloat16)),
    "strides": lambda method: method.run(*(x.mT.contiguous().mT for x in tensors())),
    "mask": lambda method: method.run(*tensors(), key_mask=mask()),
    "scale": lambda method: method.run(*tensors(), scale=0.1),
    "autocast": lambda method: torch.autocast("cpu", torch.bfloat16)(method.run)(*tensors()),
}


def test_a_graph_is_of_one_signature(backend: type[Repeating]) -> None:
    settings, others = both(), both(seed=3)
    for _ in range(3):
        for run in OTHERS.values():
            for graphed, plain in (settings, others):
                assert torch.equal(run(graphed), run(plain))
    count = 2 * len(OTHERS)
    assert (backend.captures, backend.replays) == (count, 2 * count)
    torch.use_deterministic_algorithms(True)
    settings[0].run(*tensors())
    torch.use_deterministic_algorithms(False)
    # Another device has graphs of its own.
    kept = cuda_graphs._devices.pop(torch.device("cpu"))
    settings[0].run(*tensors())
    assert cuda_graphs._devices[torch.device("cpu")] is not kept
    assert (backend.captures, backend.replays) == (count, 2 * count)


def test_the_latest_signatures_are_kept(backend: type[Repeating], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_SIGNATURES", 2)
    graphed, _ = both()
    for length in (40, 40, 41, 41, 40, 41):
        graphed.run(*tensors(length=length))
    known = cuda_graphs._devices[torch.device("cpu")]._known
    oldest = weakref.ref(next(iter(known.values())))
    assert (len(known), backend.captures, backend.waits) == (2, 2, 0)
    graphed.run(*tensors(length=42))
    gc.collect()
    assert (len(known), backend.waits, oldest()) == (2, 1, None)
    graphed.run(*tensors(length=40))  # as for the first time
    assert backend.captures == 2


def jvp(method: Method) -> torch.Tensor:
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        method.run(*(forward_ad.make_dual(x, x) for x in tensors()))
    return torch.ones(1)


def traced(method: Method) -> torch.Tensor:
    return torch.jit.trace(lambda *given: method.run(*given), tuple(tensors()), check_trace=False)(*tensors())


EAGER: dict[str, tuple[dict[str, Any], Callable[[Method], torch.Tensor]]] = {
    "a gradient": ({}, lambda method: torch.enable_grad()(method.run)(*(x.requires_grad_() for x in tensors()))),
    "training": ({}, lambda method: method.run(*tensors(), training=True)),
    "a module in training": ({}, lambda method: method.run(*tensors(), module=torch.nn.Identity())),
    "dropout": ({}, lambda method: (torch.manual_seed(1), method.run(*tensors(), dropout_p=0.2))[1]),
    "a tolerance": ({"tolerance": 0.5}, lambda method: method.run(*tensors())),
    "a check": ({"check_finite": True}, lambda method: method.run(*tensors())),
    "float64": ({}, lambda method: method.run(*tensors(dtype=torch.float64))),
    "a subclass": ({}, lambda method: method.run(*(x.as_subclass(Subclass) for x in tensors()))),
    "vmap": ({}, lambda method: torch.vmap(method.run)(*(torch.stack([x] * 2) for x in tensors()))),
    "a tangent": ({}, jvp),
    "a mode": ({}, lambda method: method.run(*tensors())),
    "a trace": ({}, traced),
    "torch.compile": ({}, lambda method: torch.compile(method.run, backend="eager", fullgraph=True)(*tensors())),
    "no texts": ({}, lambda method: method.run(*(x[:0] for x in tensors()))),
    "short": ({"min_length": 41}, lambda method: method.run(*tensors())),
    "weights": ({}, lambda method: method.weights(*tensors()[:2])),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("reason", EAGER)
def test_what_no_graph_stands_for_runs_as_it_is(reason: str, backend: type[Repeating]) -> None:
    changes, run = EAGER[reason]
    graphed, plain = both(**changes)
    with FlopCounterMode(display=False) if reason == "a mode" else nullcontext():
        assert all(torch.equal(run(graphed), run(plain)) for _ in range(3))
    assert not backend.captures


def test_in_another_capture_or_on_another_device_nothing_is_captured(
    backend: type[Repeating], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed, plain = both()
    for captured, kinds in ((True, {"cpu": backend}), (False, {"cuda": backend})):
        backend.is_captured = captured
        monkeypatch.setattr(cuda_graphs, "BACKENDS", kinds)
        assert all(torch.equal(graphed.run(*tensors()), plain.run(*tensors())) for _ in range(3))
    assert not cuda_graphs._devices


def test_a_capture_that_fails_is_told_once(backend: type[Repeating]) -> None:
    graphed, plain = both()
    for length in (41, 41, 40):
        graphed.run(*tensors(length=length))
    backend.error = RuntimeError("operation not permitted\nand more")
    with pytest.warns(UserWarning, match=r"as a CUDA graph \(RuntimeError: operation not permitted\): from now on"):
        output = graphed.run(*tensors(1))
    assert torch.equal(output, plain.run(*tensors(1)))
    backend.error = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(torch.equal(graphed.run(*tensors(seed)), plain.run(*tensors(seed))) for seed in (1, 2, 3))
    assert (backend.captures, backend.waits) == (1, 1)
    assert not cuda_graphs._devices[torch.device("cpu")]._known  # nor is memory kept


def test_graphs_outlive_the_mode_they_were_captured_in(backend: type[Repeating]) -> None:
    graphed, plain = both()
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            output = graphed.run(*tensors())
            assert output.is_inference() == torch.is_inference_mode_enabled()
            assert torch.equal(output, plain.run(*tensors()))
    assert (backend.captures, backend.replays) == (1, 4)


def test_threads_take_turns(backend: type[Repeating]) -> None:
    graphed, plain = both()
    expected = [plain.run(*tensors(seed)) for seed in range(4)]
    wrong: list[int] = []

    def run(seed: int) -> None:
        with torch.no_grad():
            wrong.extend(seed for _ in range(20) if not torch.equal(graphed.run(*tensors(seed)), expected[seed]))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (backend.captures, backend.replays, backend.most_running) == (1, 79, 1)


@pytest.mark.filterwarnings("ignore:.*raised the perplexity")
@pytest.mark.parametrize("case", ["i-clustered", "cst", "causal i-clustered"])
def test_layers_share_a_graph_and_hooks_keep_their_outputs(case: str, backend: type[Repeating]) -> None:
    settings = {name: value for name, value in CASES[case].items() if name != "causal"}
    model = make_model("llama") if "causal" in case else tiny_model("bert")
    model = convert(model) if case == "cst" else model
    words = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), "output_hidden_states": True}
    states = {}
    for graph in ("never", "auto"):
        hf_effattn.patch_attention(model, **settings, cuda_graph=graph)
        states[graph] = model(**inputs).hidden_states
    assert (backend.captures, backend.replays) == (1, model.config.num_hidden_layers - 1)
    assert all(torch.equal(*pair) for pair in zip(*states.values(), strict=True))


def test_saved_and_loaded(tmp_path: Path, backend: type[Repeating]) -> None:
    model = hf_effattn.patch_attention(tiny_model("bert"), **CASES["i-clustered"], cuda_graph="auto")
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path).eval()
    assert loaded.config.effattn == model.config.effattn
    assert loaded.config.effattn["cuda_graph"] == "auto"
    assert torch.equal(encoded(loaded, batch_for(model)), encoded(model, batch_for(model)))
    assert backend.captures
    assert "cuda_graph" not in hf_effattn.patch_attention(loaded, settings=tmp_path, cuda_graph="never").config.effattn
    graphed, plain = both()
    assert graphed.to_dict() == plain.to_dict() | {"cuda_graph": "auto"}
    assert name_settings(graphed) == name_settings(plain)
    with pytest.raises(ValueError, match=r"i-clustered .*twice"):
        make_candidates([graphed.to_dict() | CASES["i-clustered"], CASES["i-clustered"]])


def test_what_a_graph_depends_on_beside_tensors_and_settings(backend: type[Repeating]) -> None:
    model = convert(tiny_model("bert"), composition="local-global", cuda_graph="auto")
    model(torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(0)))
    assert not cuda_graphs._devices  # the layer's weights
    positions = (torch.ones(1), torch.ones(1))
    patched, other = (
        Options(module=module, positions=positions) for module in (model.encoder.layer[0].attention.self, None)
    )
    merged = make_method("cst", slice_length=4)
    assert merged.graph_key(patched) != merged.graph_key(other)  # whose positions they are
    checked = [CASES["i-clustered"] | {"check_finite": True}]
    assert make_method("per-head", candidates=checked, heads=[[0, 0]]).graph_key(Options()) is None
