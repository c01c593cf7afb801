"""Low precision, autocast, `torch.compile`, and the Triton kernels, on a GPU or under the interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from support.gpu_autocast import autocast_of_a_gpu
from support.tiny_decoders import SIZES, left_padded, make_model, tokens
from support.tiny_models import (
    KINDS,
    MODEL_TYPES,
    SMALL_SETTINGS,
    WITH_TOPK,
    as_one_graph,
    batch_for,
    encoded,
    tiny_model,
    with_methods,
)
from transformers.cache_utils import DynamicLayer

import hf_effattn
from hf_effattn.patching.methods.clustered import BiClustered

SETTINGS = {method: SMALL_SETTINGS[method] | {"topk": 34} for method in WITH_TOPK}
CAUSAL = {"exact_keys": 24, "segment_length": 8, "window": 8, "min_length": 0, "key_clusters": 2}


pytestmark = pytest.mark.usefixtures("without_gradient")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


def floating(batch: Any, dtype: torch.dtype) -> Any:
    for name, tensor in batch.inputs.items():
        if tensor.is_floating_point():
            batch.inputs[name] = tensor.to(dtype)
    return batch


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAYS_TO_ROUND = (*DTYPES, "autocast", "autocast of a GPU")


@contextmanager
def rounding(model: Any, batch: Any, way: str) -> Iterator[None]:
    """Of the weights, or by autocast."""
    if way in DTYPES:
        model.to(DTYPES[way])
        floating(batch, DTYPES[way])
        yield
        return
    with autocast_of_a_gpu() if way.endswith("GPU") else nullcontext(), torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.slow_except("bert-*-bi-clustered", "vit-bf16-bi-clustered", "vit-autocast-bi-clustered")
@pytest.mark.parametrize(
    ("model_type", "way", "method"),
    with_methods(
        WITH_TOPK,
        # X-MOD's adapters fail under autocast in transformers itself.
        [
            (name, way)
            for name in MODEL_TYPES
            for way in (WAYS_TO_ROUND if name in KINDS else ("bf16", "autocast of a GPU"))
            if name != "xmod" or way in DTYPES
        ],
    ),
)
def test_low_precision(model_type: str, way: str, method: str, attended: list[str]) -> None:
    """It adds no more than it adds to exact attention, up to clusters that rounding puts elsewhere."""
    model = tiny_model(model_type)
    batch = batch_for(model, padding="right")
    reference = encoded(model, batch)
    approximation = error(encoded(hf_effattn.patch_attention(model, method, **SETTINGS[method]), batch), reference)
    hf_effattn.unpatch_attention(model)
    attended.clear()
    with rounding(model, batch, way):
        exact = encoded(model, batch)
        baseline = error(exact, reference)
        hf_effattn.patch_attention(model, method, **SETTINGS[method])
        output = encoded(model, batch)
        assert output.dtype == exact.dtype
        assert output.isfinite().all()
        assert len(attended) >= 2
        assert error(output, reference) < 2 * (baseline + approximation) + 0.02
        hf_effattn.patch_attention(model, method)
        assert torch.equal(encoded(model, batch), exact)


@pytest.mark.compatibility("torch", "`torch.autocast`, in training, with a cache", "runs")
@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("method", WITH_TOPK)
def test_autocast_training(method: str) -> None:
    model = hf_effattn.patch_attention(tiny_model("bert"), method, **SETTINGS[method]).train()
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        encoded(model, batch_for(model, padding="left")).square().mean().backward()
    gradient = model.encoder.layer[0].attention.self.query.weight.grad
    assert gradient.dtype == torch.float32
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def widen_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache in the dtype of the keys, which a rotation made float32: as transformers has it before 5.24."""
    update = DynamicLayer.update

    def of_keys(self: Any, keys: torch.Tensor, values: torch.Tensor, *more: Any, **named: Any) -> Any:
        return update(self, keys, values.to(torch.promote_types(keys.dtype, values.dtype)), *more, **named)

    monkeypatch.setattr(DynamicLayer, "update", of_keys)


@pytest.mark.slow_except("a_cpu-qwen3-*", "a_gpu-llama-*", "a_gpu-gpt_oss-*")
@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize(
    ("model_type", "dtype", "tolerance"),
    [
        ("llama", torch.bfloat16, None),
        ("qwen3", torch.float16, 0.05),
        ("gpt_oss", torch.bfloat16, None),
    ],
)
def test_a_cache_does_not_widen_a_decoder_under_autocast(
    model_type: str, dtype: torch.dtype, tolerance: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has one by default."""
    widen_values(monkeypatch)
    model = hf_effattn.patch_attention(make_model(model_type), "bi-clustered", tolerance=tolerance, **CAUSAL)
    ids = tokens(40)
    with torch.enable_grad(), torch.autocast("cpu", dtype):
        with_cache, without = (model(input_ids=ids, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(with_cache.logits, without.logits)
    gradients = []
    for output in (with_cache, without):
        model.zero_grad()
        with torch.enable_grad():
            output.logits.float().mean().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    assert all(map(torch.equal, *gradients))


@pytest.mark.usefixtures("autocast_rules")
def test_a_cache_does_not_widen_a_conversion_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_values(monkeypatch)
    model = hf_effattn.patch_attention(make_model("gpt2"), "cst", slice_length=8)
    ids = tokens(40)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        prompt = model(input_ids=ids[:, :-1], use_cache=True)
        step = model(input_ids=ids[:, -1:], past_key_values=prompt.past_key_values).logits
        whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(step[:, 0], whole[:, -1], rtol=0.05, atol=0.05)


def test_a_report_under_autocast() -> None:
    """Of a decoder whose rotation leaves queries and keys in float32."""
    ids = tokens(40)
    with torch.autocast("cpu", torch.bfloat16):
        methods = [{"method": "bi-clustered", **CAUSAL}]
        report = hf_effattn.report(make_model("llama", num_hidden_layers=1), [{"input_ids": ids}], methods=methods)
    assert len(report.layers) == 1


PER_HEAD = {
    "method": "per-head",
    "candidates": [{"method": method, **SMALL_SETTINGS[method]} for method in WITH_TOPK],
    "heads": [[0, 2], [1, 0], [2, 2]],
    "min_length": 0,
}
LOCAL = {"method": "cst", "slice_length": 4, "composition": "local-global"}
SINKING = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
# A model type, changes of its config, and settings.
COMPILED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"bert, {method}": ("bert", {}, {"method": method, **SMALL_SETTINGS[method]}) for method in WITH_TOPK},
    "modernbert, bi-clustered": ("modernbert", {}, {"method": "bi-clustered", **SMALL_SETTINGS["bi-clustered"]}),
    "bert, per-head": ("bert", {"num_hidden_layers": 3}, PER_HEAD),
    "bert, cst": ("bert", {}, {"method": "cst", "slice_length": 4}),
    "bert, local-global": ("bert", {}, LOCAL),
    "gpt2, cst": ("gpt2", {"use_cache": False}, {"method": "cst", "slice_length": 4}),
    "llama, bi-clustered": ("llama", {"use_cache": False}, {"method": "bi-clustered", **CAUSAL}),
    "sinks": ("granite_swa", {"use_cache": False} | SINKING, {"method": "bi-clustered", **CAUSAL}),
    "sinks, short": ("granite_swa", {"use_cache": False}, {"method": "bi-clustered", **CAUSAL, "min_length": 1000}),
}


@as_one_graph
@pytest.mark.compatibility("torch", "`torch.compile`", "runs")
@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
@torch.enable_grad()
def test_a_graph_has_the_outputs_weights_and_gradients_of_the_model(case: str) -> None:
    torch._dynamo.reset()
    model_type, changes, settings = COMPILED[case]
    model = (
        make_model(model_type, **changes) if model_type in SIZES else tiny_model(model_type, **TWO_LAYERS | changes)
    )
    if model_type in SIZES:
        inputs, seen = {"input_ids": tokens(), "attention_mask": left_padded()}, left_padded().bool()
    else:
        batch = batch_for(model, padding="right")
        inputs, seen = batch.inputs, slice(None) if batch.counts is None else batch.counts
    hf_effattn.patch_attention(model, **settings)
    weighed = settings.get("composition") is None and model_type != "whisper"

    def run(called: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = called(**inputs, output_attentions=weighed)
        output[0][seen].square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        weights = {f"layer {layer}": attn.detach() for layer, attn in enumerate(output.attentions if weighed else ())}
        return gradients | weights | {"output": output[0][seen].detach()}

    expected, compiled = run(model), run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert ("layer 1" in expected) == weighed
    for name, tensor in expected.items():
        assert (compiled[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-5, name


@pytest.mark.slow
def test_compiled_model_follows_a_new_patch() -> None:
    torch._dynamo.reset()
    model = tiny_model("bert")
    batch = batch_for(model, padding="left")
    exact = encoded(model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    outputs = []
    for topk in (4, 8):
        hf_effattn.patch_attention(model, "i-clustered", clusters=6, topk=topk, min_length=0)
        outputs.append(encoded(compiled, batch))
        torch.testing.assert_close(outputs[-1], encoded(model, batch), rtol=0, atol=0)
    assert not torch.allclose(*outputs)
    hf_effattn.unpatch_attention(model)
    torch.testing.assert_close(encoded(compiled, batch), exact, rtol=0, atol=0)


OPS = ("cluster_queries", "clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
TWO_LAYERS = {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0}


@pytest.fixture
def kernels(monkeypatch):
    """The ops choose as they would on a GPU."""
    used = []

    def choose(backend, forms, *tensors):
        used.append(forms[2])
        return forms[2]

    for op in OPS:
        monkeypatch.setattr(import_module(f"hf_effattn.ops.{op}"), "choose_backend", choose)
    monkeypatch.setattr(BiClustered, "_group_on_cpu", BiClustered._group_heads)  # as on a GPU, op by op
    return used


def output_and_gradients(model, batch, called=None):
    torch.manual_seed(5)
    model.zero_grad()
    output = encoded(model if called is None else called, batch)
    output.square().mean().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"output": output.detach()} | gradients


@pytest.mark.slow
@pytest.mark.parametrize(("method", "dropout_p"), [("bi-clustered", 0.0), ("i-clustered", 0.3)])
@torch.enable_grad()
def test_kernels_give_what_the_form_for_a_cpu_gives_checkpointed_and_as_one_graph(method, dropout_p, request):
    """With dropout, whose numbers differ between the two, checkpoints draw the same clusters and dropout again."""
    model = tiny_model("bert", **TWO_LAYERS, attention_probs_dropout_prob=dropout_p)
    hf_effattn.patch_attention(model.train(), method, **SMALL_SETTINGS[method])
    batch = batch_for(model, length=24, padding="left")
    on_a_cpu = output_and_gradients(model, batch)
    used = request.getfixturevalue("kernels")
    expected = output_and_gradients(model, batch)
    assert len(used) >= 2 * TWO_LAYERS["num_hidden_layers"]
    if not dropout_p:
        for name, tensor in on_a_cpu.items():
            assert (expected[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-7, name
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        actual = output_and_gradients(model, batch, compiled)
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, msg=name)
    model.gradient_checkpointing_enable()
    again = output_and_gradients(model, batch)
    for name, tensor in expected.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0, msg=name)
