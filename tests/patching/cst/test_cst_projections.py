"""Converted layers use projections and tables as exact attention does, whatever stands in their place."""

import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import accelerate
import peft
import pytest
import torch
from accelerate import big_modeling
from peft.utils import ModulesToSaveWrapper
from support.closeness import assert_close_to_reference
from support.cst_conversions import CONVERTED, LENGTH, convert, first_output, small_model, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache
from transformers.pytorch_utils import Conv1D

import hf_effattn
from hf_effattn.patching.methods.cst import CompositeSlices
from hf_effattn.patching.methods.cst.positions import NAME, PROJECTIONS
from hf_effattn.patching.model_types.stacks import find_stacks


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of all attention modules, by their names."""
    layers_of = {}
    for index, module in enumerate(find_stacks(model)[0].modules):
        layers = {name: part for name, part in module.named_modules() if isinstance(part, (nn.Linear, Conv1D))}
        layers_of |= {f"{index}.{name}": part for name, part in layers.items()}
    return layers_of


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


def with_two_adapters(model: Any, names: Iterable[str]) -> Any:
    is_gpt2 = model.config.model_type == "gpt2"
    config = peft.LoraConfig(r=4, target_modules=list(names), init_lora_weights=False, fan_in_fan_out=is_gpt2)
    model = peft.get_peft_model(model, config)
    model.add_adapter("two", config)
    return model.eval()


@pytest.mark.compatibility("peft", "batches of several adapters (`adapter_names`)", "runs")
@pytest.mark.parametrize(
    ("model_type", "composition", "ratio"), [("bert", "local-global", 1), ("bert", "merged", 3), ("gpt2", "merged", 1)]
)
@torch.no_grad()
def test_a_batch_of_several_adapters_is_each_alone(model_type: str, composition: str, ratio: int) -> None:
    """PEFT's `adapter_names`: every text goes through an adapter of its own, and so do the positions."""
    model = convert(small_model(model_type).double(), composition=composition, extension_ratio=ratio)
    model = with_two_adapters(model, PROJECTIONS[model_type][:2])
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
    model = with_two_adapters(model, ["c_attn"])
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
@pytest.mark.parametrize(("composition", "converted_first"), [("merged", True), ("local-global", False)])
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
@pytest.mark.parametrize(("model_type", "exactly"), [("bert", "dense mask"), ("gpt2", "short")])
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


def dense_mask(model: Any) -> torch.Tensor:
    return first_output(model, tokens(), attention_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril())


def packed(model: Any, **lengths: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(13), torch.arange(LENGTH - 13)])[None]
    return model(tokens(batch=1), position_ids=positions, use_cache=False, **lengths).logits


def packed_by_collator(model: Any) -> torch.Tensor:
    lengths = torch.tensor([0, 13, LENGTH], dtype=torch.int32)
    return packed(model, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


def prefix(model: Any) -> torch.Tensor:
    past, hidden = DynamicCache(config=model.config), model.embeddings(tokens())
    for index, layer in enumerate(model.encoder.layer):
        past.update(torch.ones(2, 2, 7, 16), torch.ones(2, 2, 7, 16), index)
        name = "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"
        hidden = layer(hidden, **{name: past})
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return hidden


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
    model = small_model(model_type)
    exact = call(model)
    convert(model)
    with pytest.warns(UserWarning, match=rf'attends exactly here, not by "cst", .*{why}') as caught:
        assert torch.equal(call(model), exact)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model)


@pytest.mark.filterwarnings("error")
def test_what_was_asked_for_is_not_warned_of() -> None:
    for model_type in ("bert", "gpt2"):
        model = convert(small_model(model_type), min_length=16)
        for length in (1, 12, LENGTH):
            first_output(model, tokens(length))
        first_output(convert(model, layers=[1]), tokens())
    first_output(convert(small_model("gpt2")), tokens(1))


def test_a_layer_that_lost_its_hooks_does_not_attend_without_positions() -> None:
    model = convert(small_model("bert"))
    module: Any = find_stacks(model)[0].modules[0]
    with pytest.raises(ValueError, match=rf"BertSelfAttention attends without its {NAME}"):
        module.forward(torch.randn(2, LENGTH, 32))
    hf_effattn.unpatch_attention(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def wrapped() -> Any:
    model = convert(small_model("bert"))
    wrapper = ModulesToSaveWrapper(getattr(model, NAME), "default")  # the tables, frozen, and a copy that learns
    setattr(model, NAME, wrapper)
    return model


def test_the_copy_of_an_adapter_learns_and_is_attended_with() -> None:
    model = wrapped()
    before = first_output(model, tokens())
    before.square().sum().backward()
    gradients = {name: weight.grad for name, weight in getattr(model, NAME).named_parameters()}
    assert all((gradient is not None) == name.startswith("modules_to_save") for name, gradient in gradients.items())
    with torch.no_grad():
        getattr(model, NAME).modules_to_save["default"].token_positions.add_(1.0)
    assert not torch.equal(first_output(model, tokens()), before)


def test_a_wrapper_of_the_tables_is_kept_put_back_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped()
    wrapper = getattr(model, NAME)
    hf_effattn.patch_attention(model, "cst", slice_length=4, attend_ends=False)
    assert getattr(model, NAME) is wrapper

    def fail(*args: Any) -> None:
        raise RuntimeError("disk on fire")

    with monkeypatch.context() as patched:
        patched.setattr(hf_effattn.patching.patch, "write_stored", fail)
        with pytest.raises(RuntimeError, match="disk on fire"):
            hf_effattn.patch_attention(model, "clustered")
    assert getattr(model, NAME) is wrapper
    with pytest.raises(
        ValueError, match=rf"the {NAME} of BertModel are inside a ModulesToSaveWrapper; extend the positions"
    ):
        hf_effattn.extend_positions(model, 128)
    assert model.config.max_position_embeddings == 64
    with pytest.warns(UserWarning, match="trained position tables"):
        hf_effattn.patch_attention(model, "cst", slice_length=8)
    assert not getattr(model, NAME).token_positions.any()
    assert not hasattr(hf_effattn.unpatch_attention(wrapped()), NAME)


def position_terms(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each layer adds to queries and to keys, `(H, R, D)`."""
    terms, attend = [], CompositeSlices.attend

    def watched(self: Any, query: Any, key: Any, value: Any, options: Any, *groups: Any) -> torch.Tensor:
        terms.append(options.positions)
        return attend(self, query, key, value, options, *groups)

    with monkeypatch.context() as patched:
        patched.setattr(CompositeSlices, "attend", watched)
        first_output(model, tokens())
    return terms


@torch.no_grad()
def test_positions_keep_their_precision_beside_a_large_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(small_model("bert")).to(torch.bfloat16)
    module: Any = find_stacks(model)[0].modules[0]
    generator = torch.Generator().manual_seed(5)
    for table in getattr(model, NAME).parameters():
        table.mul_(0.02)
    for projection in (module.query, module.key):
        projection.bias.copy_(torch.randn(32, generator=generator))
    rows = torch.cat([getattr(model, NAME).token_positions, getattr(model, NAME).slice_positions[:7]])
    terms = position_terms(model, monkeypatch)[0]
    for projection, actual in zip((module.query, module.key), terms, strict=True):
        reference = rows.double() @ projection.weight.double().T
        rounded = rows @ projection.weight.T
        assert_close_to_reference("term", actual.transpose(0, 1).flatten(1), reference, baseline=rounded)


@torch.no_grad()
def test_positions_through_offloaded_projections() -> None:
    model = convert(small_model("bert").double())
    for module in find_stacks(model)[0].modules:
        for name in ("query", "key", "value"):
            getattr(module, name).bias.normal_()
    expected = first_output(model, tokens())
    accelerate.cpu_offload(model.encoder, execution_device=torch.device("cpu"))
    assert model.encoder.layer[0].attention.self.query.bias.is_meta
    assert_close_to_reference("output", first_output(model, tokens()), expected, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
@torch.no_grad()
def test_quantised_projections_without_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bias is packed away with the weights."""
    quantised = torch.ao.quantization.quantize_dynamic(small_model("bert"), {nn.Linear}, dtype=torch.qint8)
    convert(quantised, trained=False)
    assert getattr(quantised, NAME).token_positions.dtype == torch.float32
    assert not list(find_stacks(quantised)[0].modules[0].parameters())
    assert not any(terms.any() for of_layer in position_terms(quantised, monkeypatch) for terms in of_layer)
    convert(quantised)
    assert first_output(quantised, tokens()).isfinite().all()


def test_only_trained_tables_are_missed() -> None:
    model = convert(small_model("bert"), trained=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, trained=False, extension_ratio=3)
        convert(model, extension_ratio=3, composition="local-global")
    for other in ({"method": "cst", "slice_length": 8}, {"method": "clustered", "min_length": 0}):
        with pytest.warns(UserWarning, match=rf"trained position tables \({NAME}\) that BertModel .* are left out"):
            hf_effattn.patch_attention(convert(copy.deepcopy(model)), **other)
