"""Graphs that run on later: torch.export, torch.jit.trace and pipelines give what the model gives, or are refused."""

import io
from typing import Any

import pytest
import torch
from support.tiny_decoders import make_model
from support.tiny_models import SMALL_SETTINGS, tiny_model
from torch import nn

import hf_effattn
from hf_effattn.ops.bi_clustered_attention.residuals import spread_rows, sum_of_products
from hf_effattn.patching.tolerance import sampled_rows

ANY = torch.export.Dim.DYNAMIC
LOCAL: dict[str, Any] = {"segment_length": 16, "window": 16, "min_length": 0}
BI: dict[str, Any] = SMALL_SETTINGS["bi-clustered"]
PATCHES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, kw) for name, kw in SMALL_SETTINGS.items()} | {
    "none exact": ("bi-clustered", BI | {"max_predicted_error": None}),
    "per-head": ("per-head", {"candidates": [{"method": "bi-clustered", **BI}], "heads": [[0, 1]]}),
    "cst": ("cst", {"slice_length": 8}),
    "local-global": ("cst", {"slice_length": 8, "composition": "local-global"}),
}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "clustered": ("clustered", {"clusters": 4} | LOCAL),
    "bi-clustered": ("bi-clustered", {"exact_keys": 6, "key_clusters": 2} | LOCAL),
    "per-head": (
        "per-head",
        {"candidates": [{"method": "bi-clustered", "exact_keys": 6, "key_clusters": 2} | LOCAL], "heads": [[0, 1]]},
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")


class OfWords(nn.Module):
    """Exporters give every argument a place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(input_ids=words, attention_mask=mask)[0]


def encoder(patch: str, layers: int = 1, **options: Any) -> OfWords:
    method, settings = PATCHES[patch]
    model = tiny_model("bert", num_hidden_layers=layers, max_position_embeddings=256)
    return OfWords(hf_effattn.patch_attention(model, method, **settings | options))


def decoder(patch: str, **options: Any) -> OfWords:
    method, settings = CAUSAL[patch]
    model = make_model("llama", use_cache=False, max_position_embeddings=256, num_hidden_layers=1)
    return OfWords(hf_effattn.patch_attention(model, method, **settings | options))


def batch(count: int, length: int, padding: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(5, 60, (count, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(words)
    if padding == "right":
        mask[0, -length // 4 :] = 0
    elif padding == "left":
        mask[0, : length // 4] = 0
    return words, mask


def assert_alike(graph: Any, model: nn.Module, *inputs: torch.Tensor) -> None:
    actual, expected = graph(*inputs), model(*inputs)
    seen = inputs[1].bool() if len(inputs) > 1 else torch.ones_like(inputs[0], dtype=torch.bool)
    assert (actual - expected)[seen].norm() <= 1e-5 * expected[seen].norm()


def exported(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
    shapes = tuple({0: ANY, 1: ANY} for _ in inputs)
    return torch.export.export(model, inputs, dynamic_shapes=shapes, **options).module()


each_patch = pytest.mark.parametrize(
    ("make", "patch"),
    [
        *(pytest.param(encoder, patch, id=f"bert-{patch}") for patch in PATCHES),
        *(pytest.param(decoder, patch, id=f"llama-{patch}") for patch in CAUSAL),
    ],
)


@pytest.mark.compatibility("torch", "`torch.export` with an open length", "runs")
@pytest.mark.slow
@each_patch
@torch.no_grad()
def test_an_exported_model_takes_every_length(make: Any, patch: str, attended: list[str]) -> None:
    """A decoder without a mask, instead of which transformers would hand over one of several texts."""
    model, given = make(patch), slice(2 if make is encoder else 1)
    graph = exported(model, *batch(2, 90, "right")[given])
    assert attended
    for inputs in (batch(1, 40), batch(3, 70, "left"), batch(2, 90), batch(2, 151, "right")):
        assert_alike(graph, model, *inputs[given])


def test_counts_of_rows_stay_open() -> None:
    """What makes groups, here step by step as on a GPU, and what measures errors."""

    class Rows(nn.Module):
        def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            spread, counts = spread_rows(rows, mask, 64)
            sampled = sampled_rows(rows.shape[2], mask, rows.device)
            sums = sum_of_products(rows, rows.shape[0] * rows.shape[1])
            return spread, counts, spread_rows(rows, None, 64)[0], sampled, sums

    def inputs(count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randn(count, 2, length, 8, generator=torch.Generator().manual_seed(0))
        return rows, torch.arange(length) < torch.tensor([length - length // 3] * count)[:, None]

    graph = torch.export.export(Rows(), inputs(2, 48), dynamic_shapes=({0: ANY, 2: ANY}, {0: ANY, 1: ANY})).module()
    for given in (inputs(1, 20), inputs(3, 33), inputs(2, 64), inputs(2, 150)):
        for actual, expected in zip(graph(*given), Rows()(*given), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.compatibility("torch", "`torch.jit.trace`, other texts", "runs")
@pytest.mark.slow_except("bert-cst-None", "bert-bi-clustered-None", "llama-bi-clustered-None")
@pytest.mark.parametrize("traced_with", [None, "right"])
@each_patch
@torch.no_grad()
def test_a_traced_model_takes_other_texts(make: Any, patch: str, traced_with: str | None) -> None:
    """Whether and where there is padding was kept, and in threads the labels of the traced text."""
    model = make(patch)
    graph = torch.jit.trace(model, batch(2, 90, traced_with), check_trace=False)
    for inputs in (batch(2, 90, "left"), batch(3, 70, "right"), batch(1, 120)):
        assert_alike(graph, model, *inputs)


@torch.no_grad()
def test_a_model_traced_on_threads_takes_other_texts(on_threads: Any) -> None:
    on_threads(2)
    model = encoder("per-head")
    graph = torch.jit.trace(model, batch(2, 90), check_trace=False)
    assert_alike(graph, model, *batch(2, 70, "left"))


@pytest.mark.compatibility("torch", "`torch.jit.trace`: lengths on the other side of `min_length`", "refused")
@pytest.mark.parametrize("make", [encoder, decoder])
@torch.no_grad()
def test_a_traced_model_raises_at_lengths_of_other_attention(make: Any) -> None:
    model = make("bi-clustered", min_length=80)
    for traced, others, where in ((90, (60, 79), "above"), (60, (80, 120), "below")):
        graph = torch.jit.freeze(torch.jit.trace(model, batch(2, traced, "right"), check_trace=False))
        assert_alike(graph, model, *batch(2, traced + 5, "left"))
        for length in others:
            with pytest.raises(torch.jit.Error, match=f"a text {where} its min_length"):
                graph(*batch(2, length))


@pytest.mark.compatibility("torch", "`torch.jit.trace` with a tolerance", "refused")
@torch.no_grad()
def test_a_tolerance_is_not_traced() -> None:
    model = encoder("bi-clustered", tolerance=0.1)
    with pytest.raises(NotImplementedError, match=r"decides by each text.*without a tolerance"):
        torch.jit.trace(model, batch(2, 90), check_trace=False)


CANNOT = "torch.onnx.export cannot convert the attention ops of hf_effattn"
INSTEAD = {"i-clustered": "call unpatch_attention(model)", "cst": "use torch.export or torch.compile; what was"}


def causes(error: BaseException | None) -> str:
    messages = []
    while error is not None:
        messages.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(messages)


@pytest.mark.parametrize(("patch", "strict"), [("i-clustered", True), ("cst", False)])
@torch.no_grad()
def test_onnx_is_refused_however_its_exporter_captures(
    patch: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries `strict=False` and then `strict=True`, whose compiler takes torch's own answer for False."""
    model, inputs = encoder(patch), batch(2, 40)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises((NotImplementedError, torch._dynamo.exc.TorchDynamoException)) as raised:
        torch.export.export(model, inputs, strict=strict)
    assert f"{CANNOT}: {INSTEAD[patch]}" in causes(raised.value)


@pytest.mark.compatibility("onnxscript", "`torch.onnx.export`, both exporters", "refused")
@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_both_exporters_to_onnx_say_what_to_do(dynamo: bool) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        torch.onnx.export(encoder("cst"), batch(2, 40), io.BytesIO(), dynamo=dynamo)
    assert f"{CANNOT}: {INSTEAD['cst']}" in causes(raised.value)


@pytest.mark.compatibility("torch", "`torch.distributed.pipelining.pipeline`", "runs")
@pytest.mark.slow
@pytest.mark.parametrize("patch", ["bi-clustered", "per-head", "cst"])
def test_a_pipeline_is_split(patch: str) -> None:
    """Gradients on, as for training: contexts of autograd and autocast made parts that a pipeline cannot name."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    options: dict[str, Any] = {"heads": [[0, 1], [1, 0]]} if patch == "per-head" else {}
    model, inputs = encoder(patch, layers=2, **options), batch(2, 40, "right")
    split = {"model.encoder.layer.1": pipelining.SplitPoint.BEGINNING}
    pipe = pipelining.pipeline(model, mb_args=inputs, split_spec=split)
    assert pipe.num_stages == 2
    output = pipe(*inputs)
    torch.testing.assert_close(output[0] if isinstance(output, tuple) else output, model(*inputs))
