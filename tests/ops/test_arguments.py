"""What a caller gets for wrong arguments: what was given, what is allowed."""

from _thread import start_new_thread
from importlib import import_module
from threading import Lock

import pytest
import torch

from hf_effattn import ops
from hf_effattn.ops.shared.arguments import kernel_problem
from hf_effattn.ops.shared.callers import stacklevel_of_user
from hf_effattn.ops.shared.triton import chips

OPS = {
    "clustered_attention": {},
    "improved_clustered_attention": {"topk": 3},
    "bi_clustered_attention": {"topk": 3, "key_clusters": 5, "key_labels": torch.zeros(2, 3, 10).long()},
}


def arguments(**changes):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 10, 8) for _ in range(3))
    return {
        "query": query,
        "key": key,
        "value": value,
        "labels": torch.zeros(2, 3, 10).long(),
        "clusters": 4,
    } | changes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clusters": 0}, ValueError, "clusters must be at least 1, got 0"),
        ({"clusters": 2.0}, TypeError, "clusters must be an int, got float"),
        ({"clusters": True}, TypeError, "clusters must be an int, got bool"),
        ({"query": torch.randn(3, 10, 8)}, ValueError, "query must have 4 dimensions"),
        ({"query": torch.zeros(2, 3, 10, 8).long()}, TypeError, "query must be a floating-point tensor"),
        ({"key": torch.randn(2, 3, 10, 8).double()}, ValueError, "share dtype and device"),
        ({"key": torch.randn(2, 3, 10, 6)}, ValueError, "must agree with query"),
        ({"value": torch.randn(2, 3, 9, 8)}, ValueError, "must agree with key"),
        ({"key_mask": torch.ones(2, 10)}, TypeError, r"key_mask must be boolean .* use mask.bool\(\)"),
        ({"key_mask": torch.ones(2, 9).bool()}, ValueError, r"key_mask must have shape \(B, length\) = \(2, 10\)"),
        ({"query_mask": torch.ones(2, 1, 1, 10).bool()}, ValueError, "query_mask must have shape"),
        ({"labels": torch.zeros(2, 3, 9).long()}, ValueError, "labels must be"),
        ({"labels": torch.zeros(2, 3, 10)}, TypeError, "labels must be integers"),
        ({"labels": torch.zeros(2, 3, 10, device="meta").long()}, ValueError, "labels must be on cpu like query"),
        ({"labels": torch.full((2, 3, 10), 4)}, ValueError, r"labels must lie in 0 .. clusters - 1 = 3, got 4 .. 4"),
        ({"labels": torch.full((2, 3, 10), -1)}, ValueError, "labels must lie in"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must lie in \[0, 1\)"),
        ({"backend": "tritn"}, ValueError, "backend must be one of .reference., .batched., .triton."),
    ],
)
def test_attention_arguments(op, changes, error, message):
    with pytest.raises(error, match=message):
        getattr(ops, op)(**OPS[op] | arguments(**changes))


@pytest.mark.parametrize("switch", ["new", "old"])
def test_tf32_is_read_from_the_switch_that_was_used(switch):
    """Reading the old switch raises once the new one was used."""
    chip, default = chips.Chip("cuda", 2**16), torch.backends.fp32_precision
    assert chip.dot_precision(torch.float32) == "tf32x3"
    try:
        if switch == "new":
            torch.backends.fp32_precision = "tf32"
        else:
            torch.backends.cuda.matmul.allow_tf32 = True
        assert chip.dot_precision(torch.float32) == "tf32"
    finally:
        if switch == "new":
            torch.backends.fp32_precision = default
        else:
            torch.backends.cuda.matmul.allow_tf32 = False
    assert chip.dot_precision(torch.float32) == "tf32x3"


def test_rows_whose_numbers_lie_too_far_apart():
    far = torch.empty_strided((1, 1, 2, 4), (0, 0, 1, 2**29), device="meta")
    assert "further apart" in kernel_problem(far)
    assert "further apart" in kernel_problem(far, any_width=True)


def test_a_width_that_only_some_kernels_take():
    wide = torch.empty(1, 2, 1024)
    assert "head_dim up to 256, got 1024" in kernel_problem(wide)
    assert kernel_problem(wide, any_width=True) is None


@pytest.mark.parametrize("op", ["improved_clustered_attention", "bi_clustered_attention"])
def test_topk_below_one(op):
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        getattr(ops, op)(**OPS[op] | arguments(topk=0))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key_clusters": 0}, ValueError, "key_clusters must be at least 1, got 0"),
        ({"key_clusters": 2.0}, TypeError, "key_clusters must be an int, got float"),
        ({"key_labels": torch.zeros(2, 3, 9).long()}, ValueError, r"key_labels must be \(2, 3, 10\) like key, got"),
        ({"key_labels": torch.zeros(2, 1, 10).long()}, ValueError, r"key_labels must be \(2, 3, 10\) like key, got"),
        ({"key_labels": torch.zeros(2, 3, 10)}, TypeError, "key_labels must be integers"),
        ({"key_labels": torch.full((2, 3, 10), 5)}, ValueError, r"key_labels must lie in 0 .. key_clusters - 1 = 4"),
        ({"key_labels": torch.full((2, 3, 10), -1)}, ValueError, "key_labels must lie in"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "batched"])
def test_arguments_about_key_clusters(changes, error, message, backend):
    with pytest.raises(error, match=message):
        ops.bi_clustered_attention(**OPS["bi_clustered_attention"] | arguments(**changes), backend=backend)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"exact_heads": torch.ones(2, 3)}, TypeError, r"exact_heads must be boolean .*, got torch.float32; use mask"),
        ({"exact_heads": torch.ones(2, 1).bool()}, ValueError, r"\(B, heads of key\) = \(2, 3\), got \(2, 1\)"),
        ({"exact_heads": torch.ones(2, 3, device="meta").bool()}, ValueError, "is on meta, the tensors on cpu"),
    ],
)
def test_arguments_of_bi_clustered_attention_alone(changes, error, message):
    with pytest.raises(error, match=message):
        ops.bi_clustered_attention(**OPS["bi_clustered_attention"] | arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clusters": 0}, ValueError, "clusters must be at least 1, got 0"),
        ({"method": "kmean"}, ValueError, "method must be one of 'kmeans', 'lsh', got 'kmean'"),
        ({"iterations": -1}, ValueError, "iterations must be at least 0, got -1"),
        ({"bits": 0}, ValueError, "bits must be at least 1"),
        ({"fit_queries": 0}, ValueError, "fit_queries must be at least 1"),
        ({"seed": 1.5}, TypeError, "seed must be an int"),
        ({"query": torch.zeros(3, 4)}, ValueError, "query must have 4 dimensions"),
        ({"query": torch.zeros(2, 3, 10, 8).int()}, TypeError, "query must be a floating-point tensor"),
        ({"key": torch.zeros(2, 3, 4, 8).int()}, TypeError, "key must be a floating-point tensor"),
        ({"seed": 2**63}, ValueError, "seed must be at most"),
        ({"key": torch.zeros(2, 3, 4, 5)}, ValueError, "key .* must agree with query"),
        ({"query_mask": torch.ones(2, 10)}, TypeError, "query_mask must be boolean"),
        ({"query": torch.full((2, 3, 10, 8), torch.inf), "check_finite": True}, ValueError, "not finite"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_clustering_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        ops.cluster_queries(**({"query": torch.randn(2, 3, 10, 8), "clusters": 4} | changes))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"key": torch.randn(2, 2, 10, 8), "value": torch.randn(2, 2, 10, 8)},
            "heads as query, 3, or a number",
        ),
        ({"query": torch.randn(2, 0, 10, 8)}, "need at least one head"),
        ({"value": torch.randn(2, 3, 10, 0)}, "need at least one head and one dimension"),
    ],
)
def test_heads_that_do_not_fit(op, changes, message):
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(**OPS[op] | arguments(**changes))


def test_a_warning_from_a_thread_without_a_user_points_at_itself():
    """Such as autograd's, in which a checkpointed layer of a GPU runs once more."""
    lock, levels = Lock(), []
    lock.acquire()
    module = {"__name__": "torch.utils", "stacklevel_of_user": stacklevel_of_user, "levels": levels, "lock": lock}
    exec("def inner():\n    levels.append(stacklevel_of_user())\n    lock.release()", module)
    exec("def outer():\n    inner()", module)
    start_new_thread(module["outer"], ())
    assert lock.acquire(timeout=60)
    module["outer"]()
    assert levels == [1, 3]


def test_kernels_say_which_triton_they_need(monkeypatch):
    arguments = import_module("hf_effattn.ops.shared.arguments")
    rows = torch.zeros(1, 1, 4, 8)
    monkeypatch.setattr(arguments, "_triton_version", lambda: (3, 3))
    assert kernel_problem(rows) == "the kernels need triton 3.4 or newer, got 3.3"
    monkeypatch.setattr(arguments, "_triton_version", lambda: (4, 0))
    assert kernel_problem(rows) is None
