"""Every model type of the table: the method runs, stays close, honours padding, and goes away without a trace."""

import warnings

import pytest
import torch
from support.tiny_models import (
    APPROXIMATIONS,
    FULL_LAYERS,
    MODEL_TYPES,
    MODEL_TYPES_AND_PADDINGS,
    SETTINGS,
    SMALL_SETTINGS,
    TEXTS,
    WITH_TOPK,
    batch_for,
    encoded,
    hidden_states,
    mostly_slow,
    tiny_config,
    tiny_model,
    with_methods,
)
from support.tiny_towers import CLASSES
from transformers import (
    BertLMHeadModel,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    EncoderDecoderModel,
    VisionTextDualEncoderModel,
)

import hf_effattn
from hf_effattn.patching.model_types.stacks import find_stacks
from hf_effattn.patching.model_types.table import MODEL_TYPES as TABLE

pytestmark = pytest.mark.usefixtures("without_gradient")
FORCED = {"clusters": 6, "min_length": 0}
# MobileBERT adds to every token its neighbours' embeddings, padded or not.
SEEING_NO_PADDING = [name for name in TEXTS if name != "mobilebert"]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual - exact).norm() / exact.norm()).item()


def test_the_table_is_covered() -> None:
    """Tests of their own have causal types, those in `CLASSES`, Longformer's kind, and one of windows alone."""
    others = {name for name, entry in TABLE.items() if not entry.causal and not entry.has_own_forward}
    assert SETTINGS.keys() | CLASSES.keys() | {"openai_privacy_filter"} == others


@pytest.mark.slow_except("bert-None-*|bert-left-bi*|vit-*-bi*|bart-left-bi*|modernbert-left-bi*|*gemma2_text-left-bi*")
@pytest.mark.parametrize(("model_type", "padding", "method"), with_methods(WITH_TOPK, MODEL_TYPES_AND_PADDINGS))
def test_method_runs_and_is_close_where_topk_is_large(
    model_type: str, padding: str | None, method: str, attended: list[str]
) -> None:
    model = tiny_model(model_type)
    batch = batch_for(model, padding=padding)
    exact = encoded(model, batch)

    assert hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method] | {"topk": 4}) is model
    coarse = relative_error(encoded(model, batch), exact)
    assert attended == [method] * len(FULL_LAYERS.get(model_type, range(3)))

    all_but_two = hidden_states(model, batch.inputs).shape[1] - 2
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method] | {"topk": all_but_two})
    fine = relative_error(encoded(model, batch), exact)
    assert 1e-3 < coarse < 1
    assert 0 < fine < min(0.1, coarse / 2)


@pytest.mark.slow_except(
    "bert-*|vit-*|clip_*|wav2vec2-*|whisper-*|*bart-bi*|*albert-bi*|m*bert-bi*|xmod-*|*_text-bi*|es*-bi*"
)
@pytest.mark.parametrize(("model_type", "method"), with_methods(APPROXIMATIONS))
def test_short_inputs_are_exact_by_default_and_off_is_bit_equal(
    model_type: str, method: str, attended: list[str]
) -> None:
    model = tiny_model(model_type)
    batch = batch_for(model, padding="right")
    config = model.config.to_dict()
    names = [set(vars(module)) for module in model.modules()]
    exact = encoded(model, batch)
    hf_effattn.patch_attention(model, method)
    assert torch.equal(encoded(model, batch), exact)
    assert attended == []
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method])
    assert not torch.equal(encoded(model, batch), exact)
    assert hf_effattn.unpatch_attention(model) is model
    assert torch.equal(encoded(model, batch), exact)
    assert model.config.to_dict() == config
    assert [set(vars(module)) for module in model.modules()] == names


@pytest.mark.slow_except("bert-*clustered|bart-bi*|xmod-bi*|modernbert-bi*|*gemma2_text-bi*|albert-bi*")
@pytest.mark.parametrize(("model_type", "method"), with_methods(APPROXIMATIONS, SEEING_NO_PADDING))
def test_a_padded_batch_is_its_texts_alone(model_type: str, method: str) -> None:
    """Padded rows cost no cluster and move no centroid, and what they hold does not reach the rows that count."""
    model = tiny_model(model_type)
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method])
    batch = batch_for(model, padding="right")
    together = hidden_states(model, batch.inputs)[0, :29]
    other = batch.inputs["input_ids"].masked_fill(batch.inputs["attention_mask"] == 0, 7)
    assert torch.equal(hidden_states(model, batch.inputs | {"input_ids": other})[0, :29], together)
    first = {name: tensor[:1] for name, tensor in batch.inputs.items() if name != "attention_mask"}
    alone = hidden_states(model, first | {"input_ids": first["input_ids"][:, :29]})[0]
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("model_type", mostly_slow(x for x in MODEL_TYPES if x not in ("albert", *FULL_LAYERS)))
def test_layers_choose_modules(model_type: str, attended: list[str]) -> None:
    model = tiny_model(model_type)
    batch = batch_for(model)
    hf_effattn.patch_attention(model, "clustered", layers=[-1, 0], **FORCED)
    assert model.config.effattn["layers"] == [0, 2]
    (encoder,) = find_stacks(model)
    assert [module._effattn.method is not None for module in encoder.modules] == [True, False, True]
    encoded(model, batch)
    assert len(attended) == 2


def test_albert_shares_one_module_among_its_layers(attended: list[str]) -> None:
    model = tiny_model("albert", num_hidden_layers=4, num_hidden_groups=2)
    hf_effattn.patch_attention(model, "clustered", layers=[2, 3], **FORCED)
    encoded(model, batch_for(model))
    assert len(attended) == 2
    with pytest.raises(ValueError, match=r"layers \[0, 1\] of AlbertModel share one attention module.*got \[1\]"):
        hf_effattn.patch_attention(model, "clustered", layers=[1, 2, 3])


def test_a_part_inside_a_model_of_another_type(attended: list[str]) -> None:
    """Depth Anything is not in the table, its backbone is; it takes images of any size, so nothing warns."""
    backbone = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 28}
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False}
    widths = {"reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}
    torch.manual_seed(0)
    config = DepthAnythingConfig(backbone_config=Dinov2Config(**backbone, **stages), **widths, head_hidden_size=8)
    model = DepthAnythingForDepthEstimation(config).eval()
    images = torch.randn(1, 3, 112, 112)
    exact = model(images).predicted_depth
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_effattn.patch_attention(model, "clustered", **FORCED)
    model(images)
    assert attended == ["clustered"] * 4
    hf_effattn.unpatch_attention(model)
    assert torch.equal(model(images).predicted_depth, exact)


def test_encoder_decoder_patches_the_encoder_alone(attended: list[str]) -> None:
    """Fed the same encoder output, the decoder is bit-equal."""
    decoder = tiny_config("bert", is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=tiny_model("bert", seed=1), decoder=BertLMHeadModel(decoder)).eval()
    tokens = batch_for(model.encoder).inputs["input_ids"]
    hidden = model.encoder(input_ids=tokens)
    exact = model(encoder_outputs=hidden, decoder_input_ids=tokens).logits
    hf_effattn.patch_attention(model, "clustered", **FORCED)
    assert model.encoder.config._attn_implementation == "clustered"
    assert model.decoder.config._attn_implementation == "sdpa"
    assert torch.equal(model(encoder_outputs=hidden, decoder_input_ids=tokens).logits, exact)
    assert attended == []
    assert not torch.equal(model(input_ids=tokens, decoder_input_ids=tokens).logits, exact)
    assert len(attended) == 3
    assert "effattn" in model.config.to_dict()["encoder"]


def test_two_encoders_in_one_model(attended: list[str]) -> None:
    model = VisionTextDualEncoderModel(vision_model=tiny_model("vit"), text_model=tiny_model("bert")).eval()
    hf_effattn.patch_attention(model, "clustered", layers=[0], **FORCED)
    model(**batch_for(model.vision_model).inputs, **batch_for(model.text_model).inputs)
    assert len(attended) == 2
    hf_effattn.unpatch_attention(model.text_model)
    model(**batch_for(model.vision_model).inputs, **batch_for(model.text_model).inputs)
    assert len(attended) == 3


def test_two_towers_that_share_one_config() -> None:
    tower = tiny_model("bert", attn_implementation="eager")
    towers = torch.nn.ModuleList([tower, type(tower)(tower.config).eval()])
    hf_effattn.patch_attention(towers, "clustered", layers=[1], **FORCED)
    assert [len(encoder.modules) for encoder in find_stacks(towers)] == [3, 3]
    hf_effattn.unpatch_attention(towers)
    assert tower.config._attn_implementation == "eager"
    assert not hasattr(tower.config, "effattn")
