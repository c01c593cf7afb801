"""Conversion to slice attention: what is added, what it computes and learns, padding, errors, and the way back."""

import copy
from typing import Any

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.cst_conversions import CONVERTED, LENGTH, SLICES, convert, first_output, left_padded, small_model, tokens
from support.tiny_decoders import make_model
from support.tiny_models import tiny_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import hf_effattn
from hf_effattn.patching.methods.cst.positions import NAME, PROJECTIONS
from hf_effattn.patching.model_types.stacks import find_stacks
from hf_effattn.patching.module_patch import RECORD

each_model = pytest.mark.parametrize("model_type", CONVERTED)


def test_every_converted_model_type_is_tested() -> None:
    assert set(PROJECTIONS) == set(CONVERTED)


@each_model
@torch.no_grad()
def test_tables_of_zeros_come_and_go_without_a_trace(model_type: str) -> None:
    model, ids, mask = small_model(model_type), tokens(), left_padded()
    exact = first_output(model, ids, attention_mask=mask)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert hf_effattn.patch_attention(model, "cst", slice_length=4, extension_ratio=2) is model
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    prefix, slices = "transformer." if model_type == "gpt2" else "", model.config.max_position_embeddings // 4
    added = {name: tuple(after[name].shape) for name in set(after) - set(before)}
    assert added == {f"{prefix}{NAME}.token_positions": (8, 32), f"{prefix}{NAME}.slice_positions": (slices, 32)}
    trainable = dict(model.named_parameters())
    assert all(trainable[name].requires_grad and not trainable[name].any() for name in added)
    for composition in ("merged", "local-global"):
        convert(model, composition=composition, extension_ratio=2)
        assert not torch.equal(first_output(model, ids, attention_mask=mask), exact)
    assert hf_effattn.unpatch_attention(model) is model
    assert list(model.state_dict()) == list(before)
    assert not hasattr(model.config, "effattn")
    assert model.config._attn_implementation == "sdpa"
    assert not any(RECORD in vars(module) for module in model.modules())
    assert torch.equal(first_output(model, ids, attention_mask=mask), exact)


@each_model
@torch.no_grad()
def test_a_new_conversion_is_near_and_exact_where_a_slice_holds_the_text(model_type: str) -> None:
    model = small_model(model_type).double()
    ids = tokens()
    exact = first_output(model, ids)
    convert(model, trained=False, slice_length=LENGTH)
    assert_close_to_reference("one slice", first_output(model, ids), exact, rtol=1e-12)
    errors = []
    for composition in ("merged", "local-global"):
        convert(model, trained=False, composition=composition, extension_ratio=2)
        errors.append((first_output(model, ids) - exact).norm() / exact.norm())
    assert 1e-6 < errors[0] < errors[1]


@each_model
@torch.no_grad()
def test_position_tables_are_added_to_the_input_of_queries_and_keys(model_type: str) -> None:
    """One layer, one slice: with `P` added to what queries and keys are projected from, not values."""
    model = convert(small_model(model_type).double(), slice_length=8)
    module: Any = find_stacks(model)[0].modules[0]
    table = getattr(model.base_model, NAME).token_positions
    hidden = torch.randn(2, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    actual = module(hidden)[0]
    hf_effattn.unpatch_attention(model)

    def with_positions(projection: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        moved = projection.forward(args[0] + table)
        if model_type == "gpt2":  # which projects values with them
            moved[..., 64:] = output[..., 64:]
        return moved

    for name in PROJECTIONS[model_type][:2]:
        getattr(module, name).register_forward_hook(with_positions)
    assert_close_to_reference("output", actual, module(hidden)[0], rtol=1e-12)


@each_model
@pytest.mark.parametrize(("composition", "ratio"), [("merged", 3), ("local-global", 1)])
@torch.no_grad()
def test_a_padded_batch_is_its_texts_alone(model_type: str, composition: str, ratio: int) -> None:
    """On the left or on the right, of odd lengths: slices are counted from each text's first token."""
    model = convert(small_model(model_type).double(), composition=composition, extension_ratio=ratio)
    ids, mask = tokens(), left_padded()
    alone = first_output(model, ids[:1, 6:])
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    if model_type in ("roberta", "xlm-roberta", "camembert"):
        positions = {"position_ids": mask.cumsum(1) * mask + 1}
    if model_type != "distilbert":  # whose positions count from the padding
        left = first_output(model, ids, attention_mask=mask, **positions)
        assert_close_to_reference("left", left[:1, 6:], alone, rtol=1e-12)
    right = first_output(model, ids.roll(-6, dims=1), attention_mask=mask.flip(1))
    assert_close_to_reference("right", right[:1, :-6], alone, rtol=1e-12)


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@torch.no_grad()
def test_an_input_of_one_token_and_an_item_of_padding(model_type: str) -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1] = 0
    for composition in ("merged", "local-global"):
        model = convert(small_model(model_type), composition=composition)
        assert first_output(model, tokens(1)).isfinite().all()
        assert first_output(model, tokens(), attention_mask=mask).isfinite().all()


@torch.no_grad()
def test_chosen_layers() -> None:
    model, ids = small_model("bert", AutoModelForSequenceClassification), tokens()
    exact = model(ids, output_hidden_states=True).hidden_states
    convert(model, layers=[1])
    assert list(model.bert._modules)[-1] == NAME
    converted = model(ids, output_hidden_states=True).hidden_states
    assert [torch.equal(*both) for both in zip(converted, exact, strict=True)] == [True, True, False, False]


def test_converting_again() -> None:
    """Tables are kept for slices of the same sizes, begin anew for others, and go with the method."""
    model = convert(small_model("bert"))
    trained = getattr(model, NAME)
    convert(model, trained=False, composition="local-global", attend_ends=True)
    assert getattr(model, NAME) is trained
    assert model.config.effattn["composition"] == "local-global"
    assert model.config.effattn["attend_ends"] is True
    with pytest.warns(
        UserWarning, match=r"are left out: this conversion has other slices, whose positions begin at 0"
    ):
        convert(model, trained=False, extension_ratio=3)
    assert getattr(model, NAME).token_positions.shape == (12, 32)
    assert not getattr(model, NAME).token_positions.any()
    hf_effattn.patch_attention(model, "clustered")
    assert not hasattr(model, NAME)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "gpt2"])
@torch.no_grad()
def test_longer_inputs_before_and_after_the_conversion(model_type: str) -> None:
    """The slices that the present length fills are repeated; RoBERTa's table has rows for padding beside them."""
    model = small_model(model_type)
    hf_effattn.extend_positions(model, 90)
    convert(model, layers=[1, 2])
    tables = getattr(model.base_model, NAME)
    before, old = first_output(model, tokens(90)), tables.slice_positions.clone()
    tables.slice_positions.requires_grad_(False)
    hf_effattn.extend_positions(model, 120)
    assert torch.equal(tables.slice_positions[:23], old[:23])
    assert torch.equal(tables.slice_positions[23:30], old[:7])
    assert not tables.slice_positions.requires_grad
    assert torch.equal(first_output(model, tokens(90)), before)
    assert first_output(model, tokens(120)).isfinite().all()


@torch.no_grad()
def test_more_slices_than_the_tables_have() -> None:
    """As where a model with tables was made longer by hand."""
    model = convert(small_model("bert"))
    tables = getattr(model, NAME)
    tables.slice_positions = torch.nn.Parameter(tables.slice_positions[:7])
    with pytest.raises(ValueError, match=r"29 tokens are 8 slices of 4, but .* converted for 7: call .*extend_pos"):
        first_output(model, tokens(29))


def test_copied_layers_use_the_tables_of_the_model_that_they_are_put_into() -> None:
    """As who drops layers does; each copy took a hidden copy of the whole model with it."""
    model = convert(small_model("bert"))
    layers = model.encoder.layer
    model.encoder.layer = torch.nn.ModuleList([copy.deepcopy(layers[index]) for index in (0, 2)])
    first_output(model, tokens()).square().mean().backward()
    assert all(table.grad is not None and table.grad.any() for table in getattr(model, NAME).parameters())
    first_output(model.bfloat16(), tokens())


@pytest.mark.parametrize("head", [False, True])
def test_a_deep_copy_has_tables_of_its_own(head: bool) -> None:
    """Also one of the model without its head."""
    model = convert(small_model("bert", AutoModelForSequenceClassification if head else None)).base_model
    expected = first_output(model, tokens())
    copied = copy.deepcopy(model)
    first_output(copied, tokens()).square().mean().backward()
    with torch.no_grad():
        for table, original in zip(getattr(copied, NAME).parameters(), getattr(model, NAME).parameters(), strict=True):
            assert table.grad is not None
            assert original.grad is None
            table.zero_()
    assert torch.equal(first_output(model, tokens()), expected)
    assert not torch.equal(first_output(copied, tokens()), expected)


@torch.no_grad()
def test_short_inputs_and_dense_masks_stay_exact() -> None:
    model, mask = small_model("bert"), torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    exact, masked = first_output(model, tokens()), first_output(model, tokens(), attention_mask=mask)
    convert(model, min_length=LENGTH + 1)
    assert torch.equal(first_output(model, tokens()), exact)
    convert(model, min_length=LENGTH)
    assert not torch.equal(first_output(model, tokens()), exact)
    assert torch.equal(first_output(model, tokens(), attention_mask=mask), masked)


@torch.no_grad()
def test_attention_weights() -> None:
    model = convert(small_model("bert").double())
    mask = left_padded()
    for weights in model(tokens(), attention_mask=mask, output_attentions=True).attentions:
        total = weights.sum(dim=-1)
        torch.testing.assert_close(total[1], torch.ones_like(total[1]), rtol=0, atol=4e-15)
        assert not weights[0, :, :, :6].any()
    convert(model, composition="local-global")
    with pytest.raises(ValueError, match="it is no matrix of weights"):
        model(tokens(), attention_mask=mask, output_attentions=True)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    with pytest.raises(ValueError, match="it is no matrix of weights"):
        model(tokens(head_dim), output_attentions=True)


def test_models_that_cannot_be_converted() -> None:
    # Its table has 64 rows, for 62 tokens.
    with pytest.raises(ValueError, match="slice_length is 62, but RobertaModel takes 62 tokens at most"):
        hf_effattn.patch_attention(small_model("roberta"), "cst", slice_length=62)
    for model in (tiny_model("modernbert"), tiny_model("whisper"), make_model("llama")):
        name = model.config.model_type
        with pytest.raises(ValueError, match=rf'does not know where .*"{name}".*it converts bert, roberta'):
            hf_effattn.patch_attention(model, "cst", **SLICES)
        assert not hasattr(model.config, "effattn")


def test_transformers_own_switch_cannot_convert() -> None:
    """It can add no parameters, and a trained model without its tables must not pass for the whole."""
    for switched in (small_model("bert", attn_implementation="cst"), small_model("bert")):
        switched.set_attn_implementation("cst")
        with pytest.raises(ValueError, match=r'convert it with patch_attention\(model, "cst", ...\)'):
            switched(tokens())
        hf_effattn.unpatch_attention(switched)
        assert switched(tokens())[0].isfinite().all()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard], ids=["ddp", "fsdp2"])
def test_a_wrapped_model_is_not_converted(wrap: Any) -> None:
    """The position embeddings came after the wrapper, and each process trained its own."""
    wrapped = wrap(small_model("bert"))
    with pytest.raises(ValueError, match=r'"cst" adds parameters, .*(DataParallel|FSDP\w+) .* then wrap it'):
        hf_effattn.patch_attention(wrapped, "cst", **SLICES)
    assert not any(NAME in name for name, _ in wrapped.named_parameters())
    hf_effattn.patch_attention(wrapped, "clustered", clusters=4, min_length=0)
    hf_effattn.patch_attention(wrap(convert(small_model("bert"))), "cst", **SLICES)


each_composition = pytest.mark.parametrize("composition", ["merged", "local-global"])


def task(model_type: str, **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with a head, and a padded batch with labels."""
    auto_class = AutoModelForCausalLM if model_type == "gpt2" else AutoModelForSequenceClassification
    model = small_model(model_type, auto_class, **changes)
    ids, mask = tokens(), left_padded()
    labels = ids.masked_fill(mask == 0, -100) if model_type == "gpt2" else torch.tensor([0, 1])
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
@each_composition
def test_every_parameter_gets_a_gradient(model_type: str, composition: str) -> None:
    """Those of new tables too, although all their entries are 0."""
    model, inputs = task(model_type)
    convert(model, composition=composition, trained=False, extension_ratio=2)
    model(**inputs).loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    tables = [gradient for name, gradient in gradients.items() if NAME in name]
    assert len(tables) == 2
    assert all(gradient.any() for gradient in tables)


@each_composition
def test_gradients_of_the_tables_are_those_of_small_changes(composition: str) -> None:
    model, inputs = task("gpt2")
    inputs.pop("labels")
    convert(model.double(), composition=composition, extension_ratio=2)
    model(**inputs).logits[1].sin().sum().backward()
    for table in getattr(model.base_model, NAME).parameters():
        gradient = table.grad
        direction = torch.randn(table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                table += step * direction
                losses.append(model(**inputs).logits[1].sin().sum().item())
                table -= step * direction
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx((gradient * direction).sum().item(), rel=1e-5)


@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize(
    ("model_type", "composition", "dtype"),
    [("bert", "merged", torch.float16), ("bert", "local-global", torch.bfloat16), ("gpt2", "merged", torch.bfloat16)],
)
def test_autocast_is_close_to_full_precision(model_type: str, composition: str, dtype: torch.dtype) -> None:
    weights = {"initializer_range": 0.05}
    model, inputs = task(model_type, **weights)
    convert(model, composition=composition)
    with torch.autocast("cpu", dtype=dtype):
        output = model(**inputs)
    output.loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    valid = inputs["attention_mask"].bool() if model_type == "gpt2" else slice(None)
    exact = model.double()(**inputs).logits.detach()
    logits, rounding = output.logits.detach().double(), torch.finfo(dtype).eps
    assert_close_to_reference("logits", logits[valid], exact[valid], rtol=4 * rounding)
