"""The old name of the cache, of which transformers warns from 5.24 on: no model of ours writes it for a caller."""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_effattn.models import clusterformer, cst

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
STRICT = {"causal": "strict", "decoder_start_token_id": 2}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clusterformer encoder": (clusterformer.ClusterFormerModel, {}),
    "clusterformer": (clusterformer.ClusterFormerForCausalLM, STRICT),
    "clusterformer of two": (clusterformer.ClusterFormerForConditionalGeneration, STRICT),
    "cst encoder": (cst.CSTModel, {"slice_length": 4}),
    "cst": (cst.CSTForCausalLM, {"slice_length": 4, "is_decoder": True}),
}


@pytest.fixture(autouse=True)
def _silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A warning, or a word of transformers that is said once a process, is an error."""

    def refuse(_: logging.Logger, message: str, *more: Any) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(logging.Logger, "warning_once", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.compatibility("transformers", "the cache by its new name", "runs")
@pytest.mark.parametrize("name", MODELS)
def test_no_model_uses_a_deprecated_name(name: str) -> None:
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES | changes)).eval()
    ids = torch.randint(5, 60, (2, 12))
    decoder = {"decoder_input_ids": ids[:, :4]} if "two" in name else {}
    with torch.no_grad():
        output = model(input_ids=ids, **decoder)
    if "encoder" in name:
        return
    assert output[1] is not None  # the cache, under whatever name
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert generated.shape[0] == 2
