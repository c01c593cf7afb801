"""Low precision, autocast and `torch.compile`."""

from typing import Any

import pytest
import torch
from support.tiny_decoders import make_model
from support.tiny_models import MODEL_TYPES, SMALL_SETTINGS, WITH_TOPK, batch_for, encoded, mostly_slow, tiny_model
from transformers.cache_utils import DynamicLayer

import hf_effattn

SETTINGS = {method: SMALL_SETTINGS[method] | {"topk": 34} for method in WITH_TOPK}
CAUSAL = {"exact_keys": 24, "key_clusters": 2, "segment_length": 8, "window": 8, "min_length": 0}


pytestmark = pytest.mark.usefixtures("without_gradient")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


def floating(batch: Any, dtype: torch.dtype) -> Any:
    for name, tensor in batch.inputs.items():
        if tensor.is_floating_point():
            batch.inputs[name] = tensor.to(dtype)
    return batch


@pytest.mark.slow_except("bert-*-bi-clustered", "vit-bf16-bi-clustered")
@pytest.mark.parametrize("method", WITH_TOPK)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("model_type", mostly_slow(MODEL_TYPES))
def test_low_precision_weights(model_type: str, dtype: torch.dtype, method: str, attended: list[str]) -> None:
    """Low precision adds no more than it adds to exact attention, up to clusters that rounding puts elsewhere."""
    model = tiny_model(model_type)
    batch = batch_for(model, padding="right")
    reference = encoded(model, batch)
    approximation = error(encoded(hf_effattn.patch_attention(model, method, **SETTINGS[method]), batch), reference)
    hf_effattn.unpatch_attention(model).to(dtype)
    attended.clear()
    floating(batch, dtype)
    baseline = error(encoded(model, batch), reference)
    hf_effattn.patch_attention(model, method, **SETTINGS[method])
    output = encoded(model, batch)
    assert output.dtype == dtype
    assert output.isfinite().all()
    assert len(attended) >= 2
    assert error(output, reference) < 2 * (baseline + approximation) + 0.02
    hf_effattn.patch_attention(model, method)
    assert abs(error(encoded(model, batch), reference) - baseline) < 1e-6


@pytest.mark.slow_except("*-bert-bi-clustered", "*-vit-bi-clustered")
@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("method", WITH_TOPK)
@pytest.mark.parametrize("model_type", mostly_slow([one for one in MODEL_TYPES if one != "xmod"]))
def test_autocast(model_type: str, method: str, attended: list[str]) -> None:
    """X-MOD's adapters fail under autocast in transformers itself."""
    model = tiny_model(model_type)
    batch = batch_for(model, padding="right")
    reference = encoded(model, batch)
    approximation = error(encoded(hf_effattn.patch_attention(model, method, **SETTINGS[method]), batch), reference)
    hf_effattn.unpatch_attention(model)
    attended.clear()
    with torch.autocast("cpu", torch.bfloat16):
        exact = encoded(model, batch)
        hf_effattn.patch_attention(model, method, **SETTINGS[method])
        output = encoded(model, batch)
        assert len(attended) >= 2
        assert output.dtype == exact.dtype
        assert output.isfinite().all()
        assert error(output, reference) < 2 * (error(exact, reference) + approximation) + 0.02
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
    ids = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.enable_grad(), torch.autocast("cpu", dtype):
        with_cache, without = (model(input_ids=ids, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(with_cache.logits, without.logits)
    gradients = []
    for output in (with_cache, without):
        model.zero_grad()
        with torch.enable_grad():
            output.logits.float().mean().backward()
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    assert all(map(torch.equal, *gradients))


@pytest.mark.usefixtures("autocast_rules")
def test_a_cache_does_not_widen_a_conversion_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_values(monkeypatch)
    model = hf_effattn.patch_attention(make_model("gpt2"), "cst", slice_length=8)
    ids = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        prompt = model(input_ids=ids[:, :-1], use_cache=True)
        step = model(input_ids=ids[:, -1:], past_key_values=prompt.past_key_values).logits
        whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(step[:, 0], whole[:, -1], rtol=0.05, atol=0.05)


def test_a_report_under_autocast() -> None:
    """Of a decoder whose rotation leaves queries and keys in float32."""
    ids = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        methods = [{"method": "bi-clustered", **CAUSAL}]
        found = hf_effattn.report(make_model("llama", num_hidden_layers=1), [{"input_ids": ids}], methods=methods)
    assert len(found.layers) == 1


# Each model type with each method, by the one way and the other; BERT by both.
WAYS = ("patch_attention", "attn_implementation")
COMPILED = [("bert", way, method) for way in WAYS for method in WITH_TOPK] + [
    (model_type, WAYS[(i + j) % 2], method)
    for i, model_type in enumerate(("modernbert", "distilbert", "vit", "whisper"))
    for j, method in enumerate(WITH_TOPK)
]


@pytest.mark.compatibility("torch", "`torch.compile`", "runs")
@pytest.mark.slow_except("bert-patch_attention-i-clustered")
@pytest.mark.parametrize(("model_type", "how", "method"), COMPILED)
def test_compiled_output_is_the_same(model_type: str, how: str, method: str) -> None:
    torch._dynamo.reset()
    settings = SMALL_SETTINGS[method]
    model = tiny_model(model_type)
    batch = batch_for(model, padding="right")
    exact = encoded(model, batch)
    if how == "patch_attention":
        hf_effattn.patch_attention(model, method, **settings)
    else:
        model.config.effattn = dict(settings)
        model.set_attn_implementation(method)
    expected = encoded(model, batch)
    assert not torch.equal(expected, exact)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(encoded(compiled, batch), expected, rtol=0, atol=0)


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
