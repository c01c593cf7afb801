"""How far it is from transformers' call to an op: each function on the way is one that a reader has to open."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.cst_conversions import small_model, tokens

import hf_effattn

MOST = 6
PATCHING = str(Path(hf_effattn.patching.__file__).parent)
LOCAL: dict[str, Any] = {"segment_length": 4, "window": 4}
CASES = [
    ("bert", "clustered", "clustered_attention", {"clusters": 4}),
    ("bert", "i-clustered", "improved_clustered_attention", {"clusters": 4, "topk": 4}),
    ("bert", "bi-clustered", "bi_clustered_attention", {"clusters": 4, "topk": 4, "key_clusters": 4}),
    ("gpt2", "clustered", "causal_clustered_attention", LOCAL | {"clusters": 4}),
    ("gpt2", "i-clustered", "causal_clustered_attention", LOCAL | {"clusters": 4, "exact_keys": 4}),
    ("gpt2", "bi-clustered", "causal_clustered_attention", LOCAL | {"exact_keys": 4, "key_clusters": 4}),
    *(
        (model_type, "cst", "slice_attention", {"slice_length": 4, "composition": composition})
        for model_type in ("bert", "gpt2")
        for composition in ("merged", "local-global")
    ),
]


@pytest.mark.parametrize(("model_type", "method", "op", "settings"), CASES)
@torch.no_grad()
def test_few_functions_lie_between_transformers_and_the_op(
    model_type: str, method: str, op: str, settings: dict[str, Any]
) -> None:
    model = small_model(model_type)
    hf_effattn.patch_attention(model, method, **settings, min_length=0)
    found: list[int] = []

    def entered(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == op:
            hops, caller = 1, frame.f_back
            while caller is not None and caller.f_code.co_filename.startswith(PATCHING):
                hops, caller = hops + 1, caller.f_back
            found.append(hops)

    sys.setprofile(entered)
    try:
        model(tokens())
    finally:
        sys.setprofile(None)
    assert found
    assert max(found) <= MOST, f"{max(found)} functions"
