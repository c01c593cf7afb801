"""Converted layers use their projections as exact attention does: one call each, whatever stands in their place."""

import inspect
import warnings
from collections import Counter
from typing import Any

import peft
import pytest
import torch
from accelerate import big_modeling
from support.closeness import assert_close_to_reference
from support.cst_conversions import CONVERTED, LENGTH, convert, first_output, small_model, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
from transformers.pytorch_utils import Conv1D

import hf_effattn
from hf_effattn.patching.methods.cst.positions import NAME, PROJECTIONS
from hf_effattn.patching.model_types.stacks import find_stacks

each_composition = pytest.mark.parametrize("composition", ["merged", "local-global"])
two_types = pytest.mark.parametrize("model_type", ["bert", "gpt2"])


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of all attention modules, by their names."""
    found = {}
    for index, module in enumerate(find_stacks(model)[0].modules):
        layers = {name: part for name, part in module.named_modules() if isinstance(part, (nn.Linear, Conv1D))}
        found |= {f"{index}.{name}": part for name, part in layers.items()}
    return found


@pytest.mark.parametrize("model_type", CONVERTED)
@torch.no_grad()
def test_every_linear_layer_is_called_as_often_as_by_exact_attention(model_type: str) -> None:
    model, calls = small_model(model_type), Counter[str]()
    for name, layer in linear_layers(model).items():
        layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    first_output(model, tokens())
    exact = calls.copy()
    calls.clear()
    first_output(convert(model), tokens())
    assert calls == exact
    calls.clear()
    first_output(convert(model, composition="local-global"), tokens())
    projections = Counter({name: exact[name] for name in exact if name.partition(".")[2] in PROJECTIONS[model_type]})
    assert calls == exact + projections


@pytest.mark.compatibility("peft", "batches of several adapters (`adapter_names`)", "runs")
@two_types
@each_composition
@pytest.mark.parametrize("ratio", [1, 3])
@torch.no_grad()
def test_a_batch_of_several_adapters_is_each_alone(model_type: str, composition: str, ratio: int) -> None:
    """PEFT's `adapter_names`: every text goes through an adapter of its own, and so do the positions."""
    model = convert(small_model(model_type).double(), composition=composition, extension_ratio=ratio)
    config = peft.LoraConfig(
        r=4,
        target_modules=list(PROJECTIONS[model_type][:2]),
        init_lora_weights=False,
        fan_in_fan_out=model_type == "gpt2",
    )
    model = peft.get_peft_model(model, config)
    model.add_adapter("two", config)
    model.eval()
    ids, mask = tokens(batch=3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, -6:] = 0
    mixed = model(input_ids=ids, attention_mask=mask, adapter_names=["default", "two", "__base__"])[0]
    with model.disable_adapter():
        alone = [first_output(model, ids, attention_mask=mask)[2]]
    for name in ("two", "default"):
        model.set_adapter(name)
        alone.append(first_output(model, ids, attention_mask=mask)[len(alone) % 2])
    alone.reverse()
    assert (alone[0] - first_output(model, ids, attention_mask=mask)[1]).abs().max() > 0.1
    for actual, expected, valid in zip(mixed, alone, mask.bool(), strict=True):
        assert_close_to_reference("output", actual[valid], expected[valid], rtol=1e-12)


@torch.no_grad()
def test_steps_of_several_adapters_over_a_cache() -> None:
    model = convert(small_model("gpt2").double(), extension_ratio=2)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config)
    model.add_adapter("two", config)
    model.eval()
    ids, names = tokens(), {"adapter_names": ["two", "default"]}
    whole = model(input_ids=ids, use_cache=False, **names).logits
    past, rows = DynamicCache(config=model.config), []
    for first, last in [(0, 11), (11, 12), (12, 19), (19, LENGTH)]:
        rows.append(model(input_ids=ids[:, first:last], past_key_values=past, **names).logits)
    assert_close_to_reference("logits", torch.cat(rows, dim=1), whole, rtol=1e-12)


@pytest.mark.compatibility("accelerate", "layerwise casting to a byte", "runs")
@pytest.mark.skipif(
    not hasattr(big_modeling, "attach_layerwise_casting_hooks"), reason="accelerate is older than this"
)
@each_composition
@pytest.mark.parametrize("converted_first", [True, False])
@torch.no_grad()
def test_weights_that_are_stored_in_a_byte(composition: str, converted_first: bool) -> None:
    """They are cast while a layer is called, and are no numbers to compute with between its calls."""
    model, expected = small_model("bert"), small_model("bert")
    for layer in expected.encoder.modules():
        if isinstance(layer, nn.Linear):
            for weight in layer.parameters():
                weight.copy_(weight.to(torch.float8_e4m3fn).float())
    settings = {"composition": composition}
    expected = first_output(convert(expected, **settings), tokens())
    if converted_first:
        convert(model, **settings)
    big_modeling.attach_layerwise_casting_hooks(
        model.encoder, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=["LayerNorm"]
    )
    if not converted_first:
        convert(model, **settings)
    assert getattr(model, NAME).token_positions.dtype == torch.float32
    assert_close_to_reference("output", first_output(model, tokens()), expected, rtol=1e-6)


class CalibratedInt8(nn.Module):
    """A linear layer that takes and gives whole numbers, of a size found by calibration, a moving average."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.largest = linear, {}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.rounded(self.linear(self.rounded(rows, "input")), "output")

    def rounded(self, rows: torch.Tensor, which: str) -> torch.Tensor:
        if self.training:
            largest = rows.abs().amax().item()
            self.largest[which] = 0.9 * self.largest.get(which, largest) + 0.1 * largest
            return rows
        step = self.largest[which] / 127
        return (rows / step).round().clamp(-127, 127) * step


@pytest.mark.parametrize("size", [0.02, 1.0])
@torch.no_grad()
def test_calibrated_int8_costs_no_more_than_in_the_exact_model(size: float) -> None:
    """Positions are of the size of hidden states, whatever they were trained to."""
    errors = {}
    for converted in (False, True):
        model = small_model("bert", initializer_range=0.1)
        if converted:
            convert(model)
            for table in getattr(model, NAME).parameters():
                table.mul_(size)
        expected = first_output(model, tokens())
        for module in find_stacks(model)[0].modules:
            for name in PROJECTIONS["bert"]:
                setattr(module, name, CalibratedInt8(getattr(module, name)).train())
        for _ in range(20):
            first_output(model, tokens())
        model.eval()
        errors[converted] = ((first_output(model, tokens()) - expected).norm() / expected.norm()).item()
    assert 0 < errors[True] < 2 * errors[False]


@pytest.mark.compatibility("torch", "DDP of a conversion with short batches, without `find_unused_parameters`", "runs")
@pytest.mark.usefixtures("one_process")
@two_types
@pytest.mark.parametrize("exactly", ["short", "dense mask"])
@pytest.mark.filterwarnings("ignore:.* attends exactly here")
def test_ddp_trains_through_batches_that_run_exactly(model_type: str, exactly: str) -> None:
    """Each process waits for a gradient of every parameter, the tables of positions among them."""
    task = AutoModelForCausalLM if model_type == "gpt2" else AutoModelForSequenceClassification
    model = convert(small_model(model_type, task), min_length=16 if exactly == "short" else 0).train()
    run = DistributedDataParallel(model)
    dense = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    short: dict[str, Any] = {"input_ids": tokens(12)}
    if exactly == "dense mask":
        short = {"input_ids": tokens(), "attention_mask": dense}
    for inputs, is_zero in ((short, True), ({"input_ids": tokens()}, False), (short, True)):
        model.zero_grad()
        run(**inputs)[0].square().mean().backward()
        for table in getattr(model.base_model, NAME).parameters():
            assert table.grad is not None
            assert (not table.grad.any()) == is_zero


def dense_mask(model: Any) -> None:
    first_output(model, tokens(), attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril())


def packed(model: Any) -> None:
    positions = torch.cat([torch.arange(13), torch.arange(LENGTH - 13)])[None]
    model(tokens(batch=1), position_ids=positions, use_cache=False)


def packed_by_collator(model: Any) -> None:
    lengths = torch.tensor([0, 13, LENGTH], dtype=torch.int32)
    positions = torch.cat([torch.arange(13), torch.arange(LENGTH - 13)])[None]
    model(tokens(batch=1), position_ids=positions, use_cache=False, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


def prefix(model: Any) -> None:
    past, hidden = DynamicCache(config=model.config), model.embeddings(tokens())
    for index, layer in enumerate(model.encoder.layer):
        past.update(torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16), index)
        name = "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"
        hidden = layer(hidden, **{name: past})
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden


@pytest.mark.compatibility("transformers", "packed texts and prefixes on a conversion", "told")
@pytest.mark.parametrize(
    ("model_type", "call", "why"),
    [
        ("bert", dense_mask, "a mask for each query"),
        ("gpt2", packed, "a mask for each query, such as that of packed texts"),
        ("gpt2", packed_by_collator, "a mask for each query, such as that of packed texts"),
        ("bert", prefix, "there are 7 more keys than tokens, such as a prefix"),
    ],
)
def test_a_conversion_that_runs_exactly_says_so_once(model_type: str, call: Any, why: str) -> None:
    model = convert(small_model(model_type))
    with pytest.warns(UserWarning, match=rf'attends exactly here, not by "cst", .*{why}') as caught:
        call(model)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model)


def test_what_was_asked_for_is_not_warned_of() -> None:
    for model_type in ("bert", "gpt2"):
        model = convert(small_model(model_type), min_length=16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for length in (1, 12, LENGTH):
                first_output(model, tokens(length))
            first_output(convert(model, layers=[1]), tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_output(convert(small_model("gpt2")), tokens(1))


def test_a_layer_that_lost_its_hooks_does_not_attend_without_positions() -> None:
    model = convert(small_model("bert"))
    module: Any = find_stacks(model)[0].modules[0]
    with pytest.raises(ValueError, match=rf"BertSelfAttention attends without its {NAME}"):
        module.forward(torch.randn(2, LENGTH, 32))
    hf_effattn.unpatch_attention(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
