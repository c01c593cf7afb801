"""Converted models with adapters around their tables or projections, and with quantised projections."""

import copy
import warnings
from typing import Any

import accelerate
import pytest
import torch
from support.closeness import assert_close_to_reference
from support.cst_conversions import convert, first_output, small_model, tokens
from torch import nn

import hf_effattn
from hf_effattn.patching.methods.cst import CompositeSlices
from hf_effattn.patching.methods.cst.positions import NAME
from hf_effattn.patching.model_types.stacks import find_stacks


class TrainedCopy(nn.Module):
    """What PEFT's `modules_to_save` puts in place of a module: it, frozen, and a copy that learns and answers."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original).requires_grad_(True)})

    def forward(self, *args: Any) -> torch.Tensor:
        return self.modules_to_save["default"](*args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["modules_to_save"]["default"], name)  # type: ignore[index]


def wrapped() -> Any:
    model = convert(small_model("bert"))
    setattr(model, NAME, TrainedCopy(getattr(model, NAME)))
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
    hf_effattn.patch_attention(model, "cst", slice_length=4, sinks=False)
    assert getattr(model, NAME) is wrapper

    def fail(*args: Any) -> None:
        raise RuntimeError("disk on fire")

    with monkeypatch.context() as patched:
        patched.setattr(hf_effattn.patching.patch, "write_stored", fail)
        with pytest.raises(RuntimeError, match="disk on fire"):
            hf_effattn.patch_attention(model, "clustered")
    assert getattr(model, NAME) is wrapper
    with pytest.raises(ValueError, match=rf"the {NAME} of BertModel are inside a TrainedCopy; extend the positions"):
        hf_effattn.extend_positions(model, 128)
    assert model.config.max_position_embeddings == 64
    with pytest.warns(UserWarning, match="trained position tables"):
        hf_effattn.patch_attention(model, "cst", slice_length=8)
    assert not getattr(model, NAME).token_positions.any()
    assert not hasattr(hf_effattn.unpatch_attention(wrapped()), NAME)


def position_terms(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each layer adds to queries and to keys, `(H, R, D)`."""
    found, attend = [], CompositeSlices.attend

    def watched(self: Any, query: Any, key: Any, value: Any, options: Any, *groups: Any) -> torch.Tensor:
        found.append(options.positions)
        return attend(self, query, key, value, options, *groups)

    with monkeypatch.context() as patched:
        patched.setattr(CompositeSlices, "attend", watched)
        first_output(model, tokens())
    return found


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
    found = position_terms(model, monkeypatch)[0]
    for projection, actual in zip((module.query, module.key), found, strict=True):
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
