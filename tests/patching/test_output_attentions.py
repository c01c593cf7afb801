"""`output_attentions=True` returns the attention that was used, one matrix per layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import (
    APPROXIMATIONS,
    MODEL_TYPES,
    MODEL_TYPES_AND_PADDINGS,
    SMALL_SETTINGS,
    WITH_DECODER,
    batch_for,
    encoded,
    mostly_slow,
    tiny_model,
)
from transformers import AutoModel

import hf_effattn
from hf_effattn.patching.model_types.stacks import find_stacks

FORCED = {"clusters": 6, "min_length": 0}


pytestmark = pytest.mark.usefixtures("without_gradient")


def attentions(model: Any, batch: Any) -> tuple[torch.Tensor, ...]:
    output = model(**batch.inputs, output_attentions=True)
    return output.encoder_attentions if model.config.model_type in WITH_DECODER else output.attentions


@pytest.mark.slow_except("*-bi-clustered", "bert-*")
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


@pytest.mark.parametrize("method", APPROXIMATIONS)
def test_the_weights_are_those_that_were_used(method: str) -> None:
    """Values times weights is what the module hands to its output projection."""
    model = hf_effattn.patch_attention(tiny_model("bert"), method, **SMALL_SETTINGS[method])
    batch = batch_for(model, padding="left")
    seen: dict[str, torch.Tensor] = {}
    (encoder,) = find_stacks(model)
    module: Any = encoder.modules[1]
    module.value.register_forward_hook(lambda _, __, output: seen.update(value=output))
    module.register_forward_hook(lambda _, __, output: seen.update(output=output[0], weights=output[1]))
    matrices = attentions(model, batch)
    assert torch.equal(matrices[1], seen["weights"])
    value = seen["value"].unflatten(-1, (2, 16)).transpose(1, 2)
    product = (seen["weights"] @ value).transpose(1, 2).flatten(2)
    assert batch.counts is not None
    torch.testing.assert_close(product[batch.counts], seen["output"][batch.counts])


@pytest.mark.slow_except("bert-*", "*-right", "vit-*")
@pytest.mark.parametrize(("model_type", "padding"), mostly_slow(MODEL_TYPES_AND_PADDINGS))
def test_exact_layers_return_exact_weights(model_type: str, padding: str | None) -> None:
    """Short inputs and unpatched layers run SDPA, which gives no weights; ours are those of eager attention."""
    model = tiny_model(model_type)
    batch = batch_for(model, padding=padding)
    model.set_attn_implementation("eager")
    expected = attentions(model, batch)
    model.set_attn_implementation("sdpa")
    hf_effattn.patch_attention(model, "i-clustered")
    actual = attentions(model, batch)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        if batch.counts is not None:  # a padded query of a sliding window may see no key: 0 here, anything in eager
            counts = batch.counts[:, None, :, None]
            one, other = one * counts, other * counts
        torch.testing.assert_close(one, other)


def test_cross_and_decoder_attentions_of_whisper() -> None:
    model = tiny_model("whisper")
    batch = batch_for(model)
    model.set_attn_implementation("eager")
    expected = model(**batch.inputs, output_attentions=True)
    model.set_attn_implementation("sdpa")
    hf_effattn.patch_attention(model, "i-clustered")
    actual = model(**batch.inputs, output_attentions=True)
    for name in ("decoder_attentions", "cross_attentions"):
        for one, other in zip(actual[name], expected[name], strict=True):
            torch.testing.assert_close(one, other)


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
