"""What only the kernels of sorted blocks can get wrong: on a GPU, else under Triton's interpreter."""

from dataclasses import replace
from importlib import import_module

import torch
from support.block_cases import Case
from support.op_cases import BLOCKS, check_kernels, with_gradients

from hf_effattn.ops import cluster_order


def test_strict_outputs_do_not_depend_on_later_words():
    """Whatever the later words are and wherever they sort, to rounding. The paper's form is the negative control."""
    case = Case("strict", B=1, H=1, N=70, causal=True, strict=True, block_length=9, clusters=3)
    inputs, other, t = (*(BLOCKS.make(case, torch.float32, seed=seed) for seed in (0, 7)), 40)
    mixed = {
        name: torch.cat([inputs[name][:, :, :t], other[name][:, :, t:]], dim=2) for name in ("query", "key", "value")
    }
    mixed["labels"] = torch.cat([inputs["labels"][:, :t], other["labels"][:, t:]], dim=1)
    changed = inputs | mixed | {"order": cluster_order(mixed["labels"])}
    for strict in (True, False):
        some = replace(case, strict=strict)
        before, after = (
            with_gradients(BLOCKS, some, given, backend="triton")["output"][:, :, :t] for given in (inputs, changed)
        )
        if strict:
            torch.testing.assert_close(after, before, rtol=0, atol=5e-7)
        else:
            assert (after - before).abs().max() > 1e-2


def test_more_clusters_than_one_program_sums_gradients_of(monkeypatch):
    module = import_module("hf_effattn.ops.sorted_block_attention.triton")
    monkeypatch.setattr(module, "CLUSTER_COLUMNS", 16)
    case = Case("many_clusters", B=1, H=1, N=60, clusters=37, D=8, Dv=8, gated=True)
    check_kernels(BLOCKS, case, BLOCKS.make(case, torch.float32))
