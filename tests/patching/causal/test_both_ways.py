"""Decoders that see the future, too: EmbeddingGemma, and any decoder whose config says `is_causal=False`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_decoders import GROUPED, MODELS
from support.tiny_models import SMALL_SETTINGS, WITH_TOPK
from transformers import AutoConfig, AutoModel

import hf_effattn
from hf_effattn.patching.model_types.stacks import find_stacks, is_causal

pytestmark = pytest.mark.usefixtures("without_gradient")
LENGTH = 300  # windows of 8 to each side run in blocks from 160 tokens on, of batches from 240
BEYOND = {"gemma3_text": 8, "gemma4_text": 9}  # how far a window reaches
WINDOWED: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}
SIZES: dict[str, dict[str, Any]] = {
    "gemma3_text": WINDOWED | {"use_bidirectional_attention": True},
    "gemma4_text": WINDOWED
    | {
        "use_bidirectional_attention": "all",
        "vocab_size_per_layer_input": 60,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
    },
    "llama": {"is_causal": False},
    "qwen3": {"is_causal": False},
    "gpt2": {"is_causal": False, "max_position_embeddings": 512},
}
each_model = pytest.mark.parametrize("model_type", [name for name in SIZES if name in MODELS])
each_padding = pytest.mark.parametrize("padding", [None, "left", "right"])


def make_model(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **GROUPED | {"n_embd": 32, "n_layer": 3} | SIZES[model_type] | changes)
    model = AutoModel.from_config(config).eval()
    for module in model.modules():
        if model_type == "gemma4_text" and hasattr(module, "q_norm"):  # unscaled: heads so sharp would run exactly
            module.q_norm.weight.data.mul_(0.15)
    return model


def batch(padding: str | None = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if padding is None:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, slice(40) if padding == "left" else slice(-40, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def hidden(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the tokens that count, `(tokens, hidden_size)`."""
    counts = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    return model(**inputs).last_hidden_state[counts]


@pytest.mark.slow_except("*-bi-clustered-left", "llama-*-None")
@each_padding
@pytest.mark.parametrize("method", WITH_TOPK)
@each_model
def test_the_method_runs_and_is_close_where_topk_is_large(
    model_type: str, method: str, padding: str | None, attended: list[str]
) -> None:
    """And the default settings leave texts so short to exact attention."""
    model, inputs = make_model(model_type), batch(padding)
    exact = hidden(model, inputs)
    hf_effattn.patch_attention(model, method)
    torch.testing.assert_close(hidden(model, inputs), exact, rtol=0, atol=1e-5)
    assert attended == []
    errors = []
    for topk in (4, LENGTH - 2):
        hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method] | {"topk": topk})
        errors.append(float((hidden(model, inputs) - exact).norm() / exact.norm()))
    assert attended == [method] * 2 * (2 if model_type in BEYOND else 3)
    assert 1e-3 < errors[0] < 1.2
    assert 0 < errors[1] < min(0.1, errors[0] / 2)
    assert torch.equal(hidden(hf_effattn.unpatch_attention(model), inputs), exact)


@pytest.mark.parametrize(
    ("model_type", "method"), [*((name, "bi-clustered") for name in SIZES if name in MODELS), ("gpt2", "cst")]
)
def test_a_later_token_changes_earlier_ones(model_type: str, method: str) -> None:
    model, inputs = make_model(model_type), batch()
    assert not any(is_causal(module) for module in find_stacks(model)[0].modules)
    hf_effattn.patch_attention(model, method, **{"slice_length": 4} if method == "cst" else SMALL_SETTINGS[method])
    before = model(**inputs).last_hidden_state
    inputs["input_ids"][:, -1] = 7
    assert (model(**inputs).last_hidden_state - before)[:, : LENGTH // 2].abs().amax() > 1e-3


@each_padding
@pytest.mark.parametrize("model_type", [name for name in BEYOND if name in MODELS])
def test_windows_run_in_blocks(model_type: str, padding: str | None, in_blocks: list[torch.Size]) -> None:
    model, inputs = make_model(model_type), batch(padding)
    exact = hidden(model, inputs)
    hf_effattn.patch_attention(model, "exact")
    torch.testing.assert_close(hidden(model, inputs), exact, rtol=0, atol=1e-5)
    assert [shape[2:] for shape in in_blocks] == [(-(-LENGTH // 64) + 1, 64, 64 + 2 * BEYOND[model_type])]


def test_a_decoder_called_both_ways_is_exact_then(attended: list[str]) -> None:
    """Its settings are a decoder's: one patched as an encoder is told by its config."""
    model, inputs = make_model("llama", is_causal=True), batch()
    exact = model(**inputs, is_causal=False).last_hidden_state
    hf_effattn.patch_attention(
        model, "i-clustered", clusters=4, exact_keys=24, segment_length=4, window=4, min_length=0
    )
    torch.testing.assert_close(model(**inputs, is_causal=False).last_hidden_state, exact)
    assert attended == []
    model(**inputs)
    assert attended == ["i-clustered"] * 3


def test_saved_and_loaded(tmp_path: Path) -> None:
    # A window of two tokens, which older versions halve once more when they load it, stays one of two.
    model, inputs = make_model("gemma3_text", sliding_window=2), batch("right")
    hf_effattn.patch_attention(model, "bi-clustered", **SMALL_SETTINGS["bi-clustered"])
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path).eval()
    assert torch.equal(hidden(loaded, inputs), hidden(model, inputs))


def test_calibration_and_report_measure_an_encoder() -> None:
    model = make_model("gemma3_text")
    settings = {"method": "bi-clustered", **SMALL_SETTINGS["bi-clustered"], "max_predicted_error": None}
    calibration = hf_effattn.calibrate(model, batch("left"), 5.0, candidates=[settings], min_length=0)
    about = calibration.settings.calibration
    assert about is not None
    assert about["model"]["bidirectional"]
    assert "bi-clustered clusters=6 topk=8 key_clusters=7" in str(calibration)
    one_way = make_model("gemma3_text", is_causal=True, use_bidirectional_attention=False)
    with pytest.raises(ValueError, match="in decoders, only in encoders"):
        hf_effattn.patch_attention(one_way, settings=calibration)
    report = hf_effattn.report(model, batch("left"), [settings], repeats=0, memory=False)
    assert not report.environment["causal"]
    assert 0 < report.measurements[1].change.hidden_error < 1.2
