"""Exports: torch.export takes one dynamic size; torch.onnx.export, which does not know the ops, says what to do."""

import io
from collections.abc import Callable

import pytest
import torch
from support import clusterformer_cases, cst_models, tiny_models
from torch import nn

import hf_effattn
from hf_effattn.models import ClusterFormerForMaskedLM, CSTForMaskedLM


class OfWords(nn.Module):
    """The exporter gives every argument a place, which transformers' models do not all take."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=words)[0]


def patched() -> nn.Module:
    return hf_effattn.patch_attention(tiny_models.tiny_model("bert"), "i-clustered", clusters=3, topk=2, min_length=0)


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: cst_models.tiny_model(CSTForMaskedLM).float(), "use torch.export"),
        (lambda: clusterformer_cases.tiny_model(ClusterFormerForMaskedLM, dtype=torch.float32), "use torch.export"),
        (patched, r"call unpatch_attention\(model\) and export the exact model"),
    ],
    ids=["cst", "clusterformer", "patched"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_the_exporter_says_what_to_do(make: Callable[[], nn.Module], instead: str) -> None:
    """By tracing: the other exporter needs a package of its own, and says that."""
    with pytest.raises(NotImplementedError, match=f"cannot convert the attention ops of hf_effattn: {instead}"):
        torch.onnx.export(OfWords(make()), (torch.arange(5, 26)[None],), io.BytesIO(), dynamo=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "axis"),
    [
        (lambda: cst_models.tiny_model(CSTForMaskedLM).float(), 0),
        (lambda: clusterformer_cases.tiny_model(ClusterFormerForMaskedLM, dtype=torch.float32), 1),
    ],
    ids=["cst-batch", "clusterformer-length"],
)
@torch.no_grad()
def test_an_exported_model_takes_other_sizes(make: Callable[[], nn.Module], axis: int) -> None:
    model = OfWords(make()).eval()
    words = torch.arange(5, 47).view(2, 21)
    size = {axis: torch.export.Dim("size", min=2, max=40)}
    exported = torch.export.export(model, (words,), dynamic_shapes=(size,)).module()
    for count in (2, 3, 19):
        others = words.flatten()[torch.arange(count * words.shape[1 - axis]) % 42]
        others = others.view(count, -1) if axis == 0 else others.view(-1, count)
        assert torch.equal(exported(others), model(others))
