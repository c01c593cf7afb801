"""Where the method does not apply, the output is transformers' own, bit for bit; weights are those that were used."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import (
    APPROXIMATIONS,
    FULL_LAYERS,
    MODEL_TYPES,
    MODEL_TYPES_AND_PADDINGS,
    SMALL_SETTINGS,
    TEXTS,
    WITH_DECODER,
    batch_for,
    encoded,
    mostly_slow,
    tiny_config,
    tiny_model,
)
from transformers import (
    AutoModel,
    DynamicCache,
    EncoderDecoderCache,
    WhisperForConditionalGeneration,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_bidirectional_mask, sdpa_mask

import hf_effattn
from hf_effattn.patching.interface.attention_function import attention
from hf_effattn.patching.model_types.stacks import find_stacks

FORCED = {"clusters": 6, "min_length": 0}
WINDOWED = [name for name, layers in FULL_LAYERS.items() if layers == (0, 2) and name in MODEL_TYPES]


pytestmark = pytest.mark.usefixtures("without_gradient")


def window_mask(length: int, reach: int = 5) -> torch.Tensor:
    index = torch.arange(length)
    return ((index[:, None] - index).abs() <= reach).expand(2, 1, length, length)


@pytest.mark.slow_except("bert-*", "*-additive")
@pytest.mark.parametrize("form", ["bool", "additive"])
# A decoder takes the mask for its cross-attention too; ESM counts its tokens.
@pytest.mark.parametrize("model_type", mostly_slow(x for x in TEXTS if x not in (*WITH_DECODER, "esm")))
def test_dense_masks(model_type: str, form: str, attended: list[str]) -> None:
    model = tiny_model(model_type)
    batch = batch_for(model)
    mask = window_mask(40)
    if form == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    batch.inputs["attention_mask"] = mask
    exact = encoded(model, batch)
    hf_effattn.patch_attention(model, "i-clustered", **FORCED)
    assert torch.equal(encoded(model, batch), exact)
    assert attended == []


def test_layers_that_are_not_chosen(attended: list[str]) -> None:
    """With all but the last layer exact, the last layer's input is transformers' own."""
    model = tiny_model("bert")
    batch = batch_for(model, padding="left")
    exact = model(**batch.inputs, output_hidden_states=True).hidden_states
    hf_effattn.patch_attention(model, "clustered", layers=[2], **FORCED)
    patched = model(**batch.inputs, output_hidden_states=True).hidden_states
    assert all(torch.equal(actual, expected) for actual, expected in zip(patched[:3], exact[:3], strict=True))
    assert not torch.equal(patched[3], exact[3])
    assert attended == ["clustered"]


@pytest.mark.slow_except("bert-*", "*-right", "vit-*")
@pytest.mark.parametrize(("model_type", "padding"), mostly_slow(MODEL_TYPES_AND_PADDINGS))
def test_inputs_of_no_more_tokens_than_clusters(model_type: str, padding: str | None, attended: list[str]) -> None:
    model = tiny_model(model_type)
    batch = batch_for(model, padding=padding)
    exact = encoded(model, batch)
    for method in APPROXIMATIONS:
        hf_effattn.patch_attention(model, method, clusters=80, min_length=0)
        assert torch.equal(encoded(model, batch), exact)
    for settings in ({"topk": 80}, {"key_clusters": 80}):
        hf_effattn.patch_attention(model, "bi-clustered", **SMALL_SETTINGS["bi-clustered"] | settings)
        assert torch.equal(encoded(model, batch), exact)
    hf_effattn.patch_attention(model, "i-clustered", clusters=4, topk=80, min_length=0)
    assert torch.equal(encoded(model, batch), exact)
    assert attended == []


@pytest.mark.parametrize("model_type", WINDOWED)
def test_sliding_window_layers(model_type: str, attended: list[str]) -> None:
    """Layer 1 of the three has a window: its output is exact, given the same input."""
    model = tiny_model(model_type)
    batch = batch_for(model, padding="left")
    hf_effattn.patch_attention(model, "i-clustered", topk=8, **FORCED)
    sliding = getattr(model.layers[1], "attn" if model_type == "modernbert" else "self_attn")
    assert sliding.sliding_window is not None
    seen: dict[str, Any] = {}

    def remember(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.update(kwargs=kwargs, args=args, output=output[0])

    with_hook = sliding.register_forward_hook(remember, with_kwargs=True)
    encoded(model, batch)
    with_hook.remove()
    assert len(attended) == 2
    model.set_attn_implementation("sdpa")
    assert torch.equal(sliding(*seen["args"], **seen["kwargs"])[0], seen["output"])


def test_bert_cross_attention_module_under_our_name(attended: list[str]) -> None:
    """As many queries as keys, and still cross-attention: the class tells, not the lengths."""
    model = tiny_model("bert", is_decoder=True, add_cross_attention=True)
    module = model.encoder.layer[0].crossattention.self
    assert type(module).__name__ == "BertCrossAttention"
    hidden = torch.randn(2, 40, 32)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    exact = module(hidden, encoder_hidden_states=hidden + 1, past_key_values=cache)[0]
    model.config._attn_implementation = "clustered"
    model.config.effattn = dict(FORCED)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert torch.equal(module(hidden, encoder_hidden_states=hidden + 1, past_key_values=cache)[0], exact)
    assert attended == []


def test_whisper_has_a_patched_encoder_and_an_exact_decoder(attended: list[str]) -> None:
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(tiny_config("whisper")).eval()
    features, long_prompt = batch_for(model).inputs["input_features"], torch.randint(5, 60, (2, 40))
    given = {"encoder_outputs": model.get_encoder()(features), "decoder_input_ids": long_prompt}
    exact = model(**given).logits
    hf_effattn.patch_attention(model, "clustered", **FORCED)
    assert torch.equal(model(**given).logits, exact)
    assert attended == []
    assert model.generate(features, max_new_tokens=5, do_sample=False).shape[0] == 2
    assert len(attended) == 3


def test_more_keys_than_queries(attended: list[str]) -> None:
    """A prefix of keys, as prefix tuning adds: the self-attention module gets q_len != kv_len and stays exact."""
    model = tiny_model("bert")
    (encoder,) = find_stacks(model)
    hf_effattn.patch_attention(model, "clustered", **FORCED)
    query, key, value = (torch.randn(2, 2, length, 16) for length in (30, 40, 40))
    mask = sdpa_mask(2, 30, 40, attention_mask=batch_for(model, padding="left").inputs["attention_mask"].bool())
    for attention_mask in (None, mask):
        ours, _ = attention("clustered", encoder.modules[0], query, key, value, attention_mask)
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        assert torch.equal(ours, exact.transpose(1, 2))
    assert attended == []


def test_mask_function_hands_on_one_row() -> None:
    config, embeds = tiny_config("bert", attn_implementation="i-clustered"), torch.zeros(2, 40, 32)
    for nothing_masked in (None, torch.ones(2, 40)):
        assert create_bidirectional_mask(config, embeds, nothing_masked) is None
    for padding in ("left", "right"):
        mask = batch_for(tiny_model("bert"), padding=padding).inputs["attention_mask"]
        assert torch.equal(create_bidirectional_mask(config, embeds, mask), mask.bool())


def test_mask_function_is_dense_for_other_rules_and_other_models() -> None:
    config = tiny_config("bert", attn_implementation="i-clustered")
    mask = batch_for(tiny_model("bert"), padding="left").inputs["attention_mask"].bool()
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS["i-clustered"]
    causal = make_mask(batch_size=2, q_length=40, kv_length=40, attention_mask=mask, config=config)
    assert torch.equal(causal, sdpa_mask(2, 40, 40, attention_mask=mask))
    both = create_bidirectional_mask(config, torch.zeros(2, 40, 32), mask, and_mask_function=lambda b, h, q, k: k <= q)
    assert both.shape == (2, 1, 40, 40)
    config.model_type = "layoutlm"
    with pytest.raises(ValueError, match=r'does not serve BertModel: its model type "layoutlm"'):
        create_bidirectional_mask(config, torch.zeros(2, 40, 32), mask)
    config.model_type = "helium"
    with pytest.warns(UserWarning, match='does not know the model type "helium", whose attention stays exact'):
        added = create_bidirectional_mask(config, torch.zeros(2, 40, 32), mask)
    expected = mask[:, None, None].expand(2, 1, 40, 40)
    assert torch.equal(added == 0, expected)
    assert (added[~expected] == torch.finfo(torch.float32).min).all()


def attentions(model: Any, batch: Any, *, of_decoder: bool = False) -> tuple[torch.Tensor, ...]:
    """Of the encoder, and of a decoder beside it."""
    output = model(**batch.inputs, output_attentions=True)
    if model.config.model_type not in WITH_DECODER:
        return output.attentions
    beside = (*output.decoder_attentions, *output.cross_attentions) if of_decoder else ()
    return (*output.encoder_attentions, *beside)


@pytest.mark.slow_except("bert-*|vit-bi*|wav2vec2-bi*|bart-bi*|modernbert-bi*|*gemma2_text-bi*")
@pytest.mark.parametrize("method", APPROXIMATIONS)
@pytest.mark.parametrize("model_type", mostly_slow(MODEL_TYPES))
def test_rows_sum_to_one_masked_keys_have_none_and_asking_changes_no_output(model_type: str, method: str) -> None:
    model = hf_effattn.patch_attention(tiny_model(model_type), method, **SMALL_SETTINGS[method])
    batch = batch_for(model, padding="right")
    assert torch.equal(encoded(model, batch, output_attentions=True), encoded(model, batch))
    matrices = attentions(model, batch)
    assert len(matrices) == 3
    for matrix in matrices:
        sums = matrix.sum(-1)
        if batch.counts is None:
            torch.testing.assert_close(sums, torch.ones_like(sums))
        else:
            counts = batch.counts[:, None].expand(sums.shape)
            torch.testing.assert_close(sums[counts], torch.ones_like(sums[counts]))
            assert (matrix.transpose(2, 3)[~counts] == 0).all()


@pytest.mark.slow_except("bert-*", "*-right", "vit-*")
@pytest.mark.parametrize(("model_type", "padding"), mostly_slow(MODEL_TYPES_AND_PADDINGS))
def test_exact_layers_return_exact_weights(model_type: str, padding: str | None) -> None:
    """Short inputs and unpatched layers run SDPA, which gives no weights; ours are those of eager attention."""
    model = tiny_model(model_type)
    batch = batch_for(model, padding=padding)
    model.set_attn_implementation("eager")
    expected = attentions(model, batch, of_decoder=True)
    model.set_attn_implementation("sdpa")
    hf_effattn.patch_attention(model, "i-clustered")
    actual = attentions(model, batch, of_decoder=True)
    assert len(actual) == len(expected)
    for weights, wanted in zip(actual, expected, strict=True):
        if batch.counts is not None and weights.shape[2] == batch.counts.shape[1]:
            # A padded query of a sliding window may see no key: 0 here, anything in eager.
            counts = batch.counts[:, None, :, None]
            weights, wanted = weights * counts, wanted * counts
        torch.testing.assert_close(weights, wanted)


def test_a_config_that_asks_for_them_is_refused(tmp_path: Path) -> None:
    """transformers saves such a config with eager attention only, so a patched model could not be saved."""
    model = tiny_model("bert", attn_implementation="eager", output_attentions=True)
    config = model.config.to_dict()
    with pytest.raises(ValueError, match=r"saves no patched model. Leave it out of .*output_attentions = False"):
        hf_effattn.patch_attention(model, "clustered", **FORCED)
    assert model.config.to_dict() == config
    assert len(model(**batch_for(model).inputs).attentions) == 3
    model.config.output_attentions = False
    hf_effattn.patch_attention(model, "clustered", **FORCED).save_pretrained(tmp_path)
    assert len(attentions(model, batch_for(model))) == 3
    with pytest.raises(ValueError, match="Leave it out of from_pretrained"):
        hf_effattn.from_pretrained(AutoModel, tmp_path, output_attentions=True)


def test_weights_in_training_are_before_dropout() -> None:
    model = tiny_model("bert", attention_probs_dropout_prob=0.5).train()
    hf_effattn.patch_attention(model, "i-clustered", topk=8, **FORCED)
    for matrix in attentions(model, batch_for(model)):
        torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 2, 40))
