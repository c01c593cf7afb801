"""Linear layers quantised by other libraries: with a patch they err no more than with exact attention."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.tiny_models import SMALL_SETTINGS
from torch import nn
from transformers import BertConfig, BertModel

import hf_effattn

METHODS = {None: {}, "bi-clustered": SMALL_SETTINGS["bi-clustered"], "cst": {"slice_length": 8, "extension_ratio": 3}}


def encoder() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    return BertModel(BertConfig(vocab_size=300, initializer_range=0.2, **sizes)).eval()


def by_torchao(model: nn.Module, ids: torch.Tensor) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def by_quanto(model: nn.Module, ids: torch.Tensor) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


def by_quanto_with_activations(model: nn.Module, ids: torch.Tensor) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8)
    with quanto.Calibration():
        model(ids)
    quanto.freeze(model)


def by_torch(model: nn.Module, ids: torch.Tensor) -> None:
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)


def by_bitsandbytes(model: nn.Module, ids: torch.Tensor) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear):
            has_bias = layer.bias is not None
            new = bitsandbytes.nn.Linear8bitLt(layer.in_features, layer.out_features, has_bias, has_fp16_weights=False)
            new.load_state_dict(layer.state_dict())
            model.set_submodule(name, new.to("cpu"))


@pytest.mark.compatibility("torch", "`quantize_dynamic`, int8, with bi-clustered and cst", "runs")
@pytest.mark.compatibility("torchao", "int8 weights, with bi-clustered and cst", "runs")
@pytest.mark.compatibility("optimum-quanto", "int8 weights, calibrated activations, with bi-clustered and cst", "runs")
@pytest.mark.compatibility("bitsandbytes", "int8 linear layers, with bi-clustered and cst", "runs")
@pytest.mark.parametrize("quantise", [by_torch, by_torchao, by_quanto, by_quanto_with_activations, by_bitsandbytes])
def test_a_patch_adds_no_error_to_quantised_layers(quantise: Callable[[nn.Module, torch.Tensor], None]) -> None:
    torch.manual_seed(1)
    ids = torch.randint(5, 300, (2, 200))
    added, errors = {}, {}
    with torch.no_grad():
        exact = encoder()(ids).last_hidden_state
        for method, settings in METHODS.items():
            model = encoder()
            if method is not None:
                hf_effattn.patch_attention(model, method, **settings)
            if method == "cst":
                for table in model.hf_effattn_cst.parameters():
                    table.normal_(std=0.3)
            before = model(ids).last_hidden_state
            quantised = copy.deepcopy(model)
            quantise(quantised, ids)
            after = quantised(ids).last_hidden_state
            added[method] = float((after - before).norm() / before.norm())
            errors[method] = (
                float((before - exact).norm() / exact.norm()),
                float((after - exact).norm() / exact.norm()),
            )
    # Other clusters are other, equally good approximations: of these the error against exact attention tells.
    of_patch, of_both = errors["bi-clustered"]
    assert of_patch < of_both < of_patch + 2 * added[None]
    assert 0 < added["cst"] < 2 * added[None]
