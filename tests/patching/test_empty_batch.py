"""A batch of no texts: no output, no gradient, no error that the exact model has not."""

from typing import Any

import pytest
import torch
from support.tiny_models import APPROXIMATIONS, LENGTH, SMALL_SETTINGS, tiny_model
from transformers import AttentionInterface

import hf_effattn
from hf_effattn.patching.methods import Method, make_method

LOCAL = {"segment_length": 4, "window": 4, "min_length": 0}
SETTINGS: dict[str, dict[str, Any]] = {name: SMALL_SETTINGS[name] for name in APPROXIMATIONS}
OF_DECODERS: dict[str, dict[str, Any]] = {
    "clustered": LOCAL | {"clusters": 6},
    "i-clustered": LOCAL | {"clusters": 6, "exact_keys": 8},
    "bi-clustered": LOCAL | {"exact_keys": 8, "key_clusters": 4},
}
CANDIDATES = [{"method": name, **settings} for name, settings in SETTINGS.items()]
EXACT = len(CANDIDATES)
# Of two heads: every candidate, exact heads beside one, and alone.
ROWS = [[0, 1], [2, EXACT], [EXACT, EXACT]]


def methods(causal: bool) -> list[Method]:
    settings = OF_DECODERS if causal else SETTINGS
    candidates = [{"method": name, **own} for name, own in settings.items()]
    found = [make_method(name, causal=causal, **own) for name, own in settings.items()]
    found.append(make_method("bi-clustered", causal=causal, **settings["bi-clustered"], tolerance=0.1))
    rows = [make_method("per-head", causal=causal, candidates=candidates, heads=[row], min_length=0) for row in ROWS]
    return [*found, *rows]


PATCHES: dict[str, dict[str, Any]] = SETTINGS | {
    "per-head": {"candidates": CANDIDATES, "heads": ROWS, "min_length": 0},
    "cst": {"slice_length": 8, "min_length": 0},
}


def outcome(model: torch.nn.Module) -> Any:
    """What comes of a forward pass on no texts: the size of the output, or the error."""
    try:
        return model(input_ids=torch.zeros(0, LENGTH, dtype=torch.long)).last_hidden_state.shape
    except RuntimeError as error:
        return str(error)


def check(method: Method, group: int, *, compiled: bool = False, **options: Any) -> None:
    inputs = [torch.zeros(0, heads, 23, 8, requires_grad=True) for heads in (2 * group, 2, 2)]
    run = torch.compile(method.run, fullgraph=True, backend="eager") if compiled else method.run
    with torch.no_grad():
        assert run(*inputs, **options).shape == inputs[0].shape
    gradients = torch.autograd.grad(run(*inputs, **options).sum(), inputs)
    assert [one.shape for one in gradients] == [one.shape for one in inputs]


@pytest.mark.parametrize(("group", "masked"), [(1, False), (2, True)])
@pytest.mark.parametrize("causal", [False, True])
def test_methods_give_no_rows(causal: bool, group: int, masked: bool) -> None:
    options: dict[str, Any] = {"key_mask": torch.ones(0, 23, dtype=torch.bool) if masked else None, "causal": causal}
    for method in methods(causal):
        check(method, group, **options)
        assert method.weights(torch.zeros(0, 2, 23, 8), torch.zeros(0, 2, 23, 8), **options).shape == (0, 2, 23, 23)


def test_a_compiled_graph_gives_no_rows() -> None:
    """There queries and keys are grouped step by step."""
    mask = torch.ones(0, 23, dtype=torch.bool)
    check(make_method("bi-clustered", **SETTINGS["bi-clustered"]), 2, compiled=True, key_mask=mask)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patched_model_does_what_the_exact_one_does(name: str) -> None:
    """Both refuse, before attention: transformers' projections ask torch how many heads no text has."""
    model = tiny_model("bert")
    exact = outcome(model)
    hf_effattn.patch_attention(model, name, **PATCHES[name])
    assert outcome(model) == exact
    query, key, value = (torch.zeros(0, 2, LENGTH, 16) for _ in range(3))
    output, _ = AttentionInterface()[name](model.encoder.layer[0].attention.self, query, key, value, None)
    assert output.shape == (0, LENGTH, 2, 16)
