"""Reports of models whose layers all run exactly: nothing by layer; outputs, times and memory as ever."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config
from transformers import (
    DebertaV2Config,
    DebertaV2Model,
    EncodecConfig,
    LongformerConfig,
    LongformerForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MPNetConfig,
    MPNetModel,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    ParakeetCTCConfig,
    ParakeetEncoder,
    ParakeetForCTC,
    PegasusXConfig,
    PegasusXModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import hf_effattn
from hf_effattn import Report
from hf_effattn.patching.model_types.stacks import find_stacks

METHOD = "exact"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
LONGFORMER = LongformerConfig(
    vocab_size=60, attention_window=16, max_position_embeddings=162, pad_token_id=1, **SIZES, initializer_range=0.3
)


def longformer() -> PreTrainedModel:
    return LongformerForSequenceClassification(LONGFORMER)


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(vocab_size=60, num_key_value_heads=2, sliding_window=16, **SIZES))


def pegasus_x() -> PreTrainedModel:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    config = PegasusXConfig(vocab_size=60, block_size=16, num_global_tokens=4, **sizes, **heads)
    return PegasusXModel(config).get_encoder()


def mpnet() -> PreTrainedModel:
    return MPNetModel(MPNetConfig(vocab_size=60, max_position_embeddings=162, **SIZES, initializer_range=0.3))


def deberta() -> PreTrainedModel:
    settings = {"relative_attention": True, "position_buckets": 16, "position_biased_input": False}
    return DebertaV2Model(DebertaV2Config(vocab_size=60, pos_att_type="p2c|c2p", **settings, **SIZES))


def t5() -> PreTrainedModel:
    return T5EncoderModel(T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4))


MODELS = {make.__name__: make for make in (longformer, mistral, pegasus_x, mpnet, deberta, t5)}


def make_model(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (2, 150), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 100:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def attention_of(model: Any) -> list[tuple[type, str]]:
    modules = [module for stack in find_stacks(model) for module in stack.modules]
    return [(type(module), model.config._attn_implementation) for module in modules]


@pytest.mark.slow_except("True-longformer", "False-mistral", "False-t5")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("patched", [False, True])
def test_what_is_measured(name: str, patched: bool, tmp_path: Any) -> None:
    model = make_model(MODELS[name])
    if patched:
        hf_effattn.patch_attention(model, METHOD)
    before = attention_of(model)
    report = hf_effattn.report(model, inputs(), max_error=0.01, repeats=1, progress=False)
    assert attention_of(model) == before
    assert report.layers == {}
    assert list(report.methods) == [METHOD]
    (measured,) = report.inputs
    assert (measured.batch_size, measured.length, measured.valid_tokens) == (2, 150, 250)
    exact, other = report.measurements
    # Mistral's 150 tokens are too few for blocks.
    assert (other.change.hidden_error == 0) == (name == "mistral")
    assert other.change.hidden_error < 1e-5
    assert min(*exact.forward_seconds, *other.forward_seconds) > 0
    assert min(exact.forward_peak_bytes, other.forward_peak_bytes) > 0
    assert report.fastest_within(0.01) == METHOD
    against = "exact SDPA" if model._supports_sdpa else "transformers' own code"
    assert f"(all layers run exactly, float32 on cpu, {_threads()}) against {against}." in str(report)
    assert "- exact: nothing is approximated; the last hidden state is off by " in str(report)
    report.save(tmp_path)
    assert Report.load(tmp_path) == report
    assert "All layers run exactly." in report.to_html(model, inputs(), _Words())
    report.plot_cost()
    with pytest.raises(ValueError, match="holds no errors of the attention output"):
        report.plot()


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


class _Words:
    """As much of a tokenizer as the page asks for."""

    all_special_ids = (1,)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [str(token_id) for token_id in ids]


@pytest.mark.slow_except("False-True", "True-False")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("headed", [False, True])
def test_sound(headed: bool, padded: bool, tmp_path: Path) -> None:
    """Its frames, of which padding is none, are those that layers see."""
    sizes = {**SIZES, "num_mel_bins": 16, "subsampling_factor": 2, "subsampling_conv_channels": 8}
    config = ParakeetCTCConfig(vocab_size=20, encoder_config=sizes)
    model = make_model(lambda: ParakeetForCTC(config) if headed else ParakeetEncoder(config.encoder_config))
    features = torch.randn(2, 300, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, 200:] = 0
    given = {"input_features": features} | ({"attention_mask": mask} if padded else {})
    report = hf_effattn.report(model, given, max_error=0.01, repeats=1, progress=False)
    (measured,) = report.inputs
    assert (measured.batch_size, measured.length) == (2, 150)
    assert measured.valid_tokens == (250 if padded else 300)
    change = report.measurements[1].change
    if headed:
        assert 0 < change.logits_error["logits"] < 1e-5
        assert change.argmax_agreement["logits"] == 1
    else:
        assert 0 < change.hidden_error < 1e-5
        assert report.fastest_within(0.01) == METHOD
    assert report.layers == {}
    assert "- exact: nothing is approximated" in str(report)
    report.save(tmp_path)
    assert Report.load(tmp_path) == report
    assert "All layers run exactly." in report.to_html(model, given)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_exact_is_transformers_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that is patched when it is measured, by whatever method."""
    model, calls = hf_effattn.patch_attention(make_model(longformer), METHOD), []
    run = LongformerSelfAttention.forward
    monkeypatch.setattr(
        LongformerSelfAttention, "forward", lambda self, *args, **how: calls.append(self) or run(self, *args, **how)
    )
    hf_effattn.report(model, inputs(), ["clustered"], repeats=0, progress=False)
    assert len(calls) == 2


def test_beside_an_encoder_with_layers_to_record() -> None:
    config = VisionTextDualEncoderConfig.from_vision_text_configs(tiny_config("vit"), LONGFORMER, projection_dim=16)
    torch.manual_seed(0)
    model = VisionTextDualEncoderModel(config).eval()
    given = {**inputs(), "pixel_values": torch.randn(2, 3, 24, 24)}
    before = [type(module) for stack in find_stacks(model) for module in stack.modules]
    assert LongformerSelfAttention in before
    report = hf_effattn.report(
        model, given, [METHOD, {"method": "clustered", "clusters": 5, "min_length": 0}], repeats=1, progress=False
    )
    assert list(report.layers.values()) == [path for path in report.layers.values() if path.startswith("vision_model")]
    windows, clustered = report.measurements[1:]
    assert windows.mean_attention_error == 0
    assert clustered.mean_attention_error > 0.01
    assert [type(module) for stack in find_stacks(model) for module in stack.modules] == before


def test_an_input_without_tokens_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"inputs\[1\] must hold input_ids, inputs_embeds, input_features or input_values, got"
    ):
        hf_effattn.report(make_model(longformer), [inputs(), {"attention_mask": inputs()["attention_mask"]}])


def test_a_text_is_counted_beside_a_recording() -> None:
    """MusicGen's T5 reads the text; what hears the recording is served by no patch."""
    text = T5Config(vocab_size=50, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48)
    sound = EncodecConfig(
        target_bandwidths=[1.5],
        hidden_size=32,
        num_filters=4,
        upsampling_ratios=[8, 4],
        codebook_size=64,
        num_lstm_layers=1,
        codebook_dim=32,
    )
    written = MusicgenDecoderConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, ffn_dim=48, num_attention_heads=4, num_codebooks=2
    )
    parts = {"text_encoder": text.to_dict(), "audio_encoder": sound.to_dict(), "decoder": written.to_dict()}
    model = MusicgenForConditionalGeneration(MusicgenConfig(**parts)).eval()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = {
        "input_ids": torch.randint(3, 50, (2, 20), generator=torch.Generator().manual_seed(0)),
        "attention_mask": mask,
        "decoder_input_ids": torch.zeros(4, 5, dtype=torch.long),
        "input_values": torch.randn(2, 1, 3200, generator=torch.Generator().manual_seed(0)),
    }
    (measured,) = hf_effattn.report(model, inputs, repeats=0, memory=False, progress=False).inputs
    assert (measured.batch_size, measured.length, measured.valid_tokens) == (2, 20, 28)
