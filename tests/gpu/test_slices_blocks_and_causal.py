"""The kernels of slices, sorted blocks, neural clustering and causal attention on a GPU, at real sizes.

Values and gradients against the batched form in float64, CUDA graphs, dropout, strides of 0, determinism.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.closeness import assert_close_to_reference

from hf_effattn import ops

N, H, D, WIDTH, CLUSTERS = 16384, 16, 64, 1024, 181
Leaves = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An op with its settings: what makes the floating-point inputs, and what calls the op on them."""

    leaves: Leaves
    call: Callable[..., tuple[torch.Tensor, ...]]

    def run(self, leaves: Leaves | None = None, **options: Any) -> tuple[torch.Tensor, ...]:
        return self.call(**(self.leaves if leaves is None else leaves), **options)

    def with_gradients(self, leaves: Leaves, **options: Any) -> Leaves:
        """Outputs and the gradients of every input, for fixed random gradients of the outputs."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
        outputs = self.run(leaves, **options)
        generator = torch.Generator(outputs[0].device).manual_seed(1)
        weights = [torch.randn(x.shape, device=x.device, generator=generator).to(x.dtype) for x in outputs]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
        found = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
        return found | dict(zip(leaves, gradients, strict=True))


def draw(device, dtype, *shape, seed=0):
    generator = torch.Generator(device).manual_seed(sum(shape) + seed)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)


def query_key_value(device, dtype, key_heads=H):
    """As transformers hands them over."""
    shapes = {"query": H, "key": key_heads, "value": key_heads}
    return {
        name: draw(device, dtype, 1, N, heads, D, seed=seed).transpose(1, 2)
        for seed, (name, heads) in enumerate(shapes.items())
    }


def slices(device, dtype, *, causal=False, slice_length=32):
    positions = {
        "query_positions": draw(device, dtype, H, slice_length, D),
        "key_positions": draw(device, dtype, H, 2 * slice_length, D),
    }
    sinks = torch.zeros(1, N, dtype=torch.bool, device=device)
    sinks[:, :: N // 4] = True
    chosen = {"slice_length": slice_length, "extension_ratio": 2, "causal": causal, "sink_mask": sinks}
    leaves = query_key_value(device, dtype) | positions
    return Case(leaves, lambda **inputs: ops.slice_attention(**inputs, **chosen))


def sorted_blocks(device, dtype, *, gated=False, causal=False, used=CLUSTERS, blocks=CLUSTERS):
    """Words in `used` clusters, cut into `blocks` blocks."""
    leaves = query_key_value(device, dtype)
    labels = draw(device, torch.float32, 1, N, used).argmax(dim=2)
    chosen = {"order": ops.cluster_order(labels), "block_length": -(-N // blocks), "causal": causal}
    if causal:
        chosen["labels"] = labels
    if gated:
        leaves["membership"] = (3 * draw(device, torch.float32, 1, N, 128)).softmax(dim=2).to(dtype)
    return Case(leaves, lambda **inputs: (ops.sorted_block_attention(**inputs, **chosen),))


def neural_clusters(device, dtype, similarity):
    leaves = {"words": draw(device, dtype, 1, N, WIDTH), "centroids": draw(device, dtype, 1, CLUSTERS, WIDTH)}
    chosen = {"similarity": similarity, "sharpness": 4.0 if similarity == "cosine" else WIDTH**-0.5}
    return Case(leaves, lambda **inputs: ops.neural_clustering(**inputs, **chosen)[:1])


def causal(device, dtype, method, *, key_heads=H, **more):
    chosen = {"method": method, "clusters": 100, "topk": 32} | more
    leaves = query_key_value(device, dtype, key_heads)
    return Case(leaves, lambda **inputs: (ops.causal_clustered_attention(**inputs, **chosen),))


CASES: dict[str, Callable[..., Case]] = {
    "slices": slices,
    "causal slices": partial(slices, causal=True),
    "slices of 8": partial(slices, slice_length=8),
    "sorted blocks": sorted_blocks,
    "long sorted blocks": partial(sorted_blocks, blocks=32),
    "gated sorted blocks": partial(sorted_blocks, gated=True),
    "strictly causal sorted blocks": partial(sorted_blocks, causal=True),
    "strictly causal, all words in one cluster": partial(sorted_blocks, causal=True, used=1),
    "neural clusters, dot": partial(neural_clusters, similarity="dot"),
    "neural clusters, cosine": partial(neural_clusters, similarity="cosine"),
}
METHODS = ("clustered", "i-clustered", "bi-clustered")
# The labels that they find are those of no other form: values are compared in tests/ops, where both get the same.
CAUSAL: dict[str, Callable[..., Case]] = {f"causal {method}": partial(causal, method=method) for method in METHODS}
CAUSAL["causal bi-clustered, some heads exact"] = partial(
    causal, method="bi-clustered", max_predicted_error=0.1, key_heads=4
)
with_dropout = pytest.mark.parametrize("name", [name for name in CASES | CAUSAL if "neural" not in name])
each_case = pytest.mark.parametrize("name", CASES | CAUSAL)


def make(name, device, dtype=torch.bfloat16):
    return (CASES | CAUSAL)[name](device, dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(name, dtype, gpu):
    case = make(name, gpu, dtype)
    exact = {leaf: tensor.double() for leaf, tensor in case.leaves.items()}
    expected = case.with_gradients(exact, backend="batched")
    baseline = case.with_gradients(case.leaves, backend="batched")
    for result, actual in case.with_gradients(case.leaves, backend="triton").items():
        assert_close_to_reference(result, actual, expected[result], baseline[result], rtol=1e-5, factor=3.0)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_neural_labels_are_those_of_float64(similarity, gpu):
    """But for words between two centroids."""
    words, centroids = neural_clusters(gpu, torch.bfloat16, similarity).leaves.values()
    _, labels = ops.neural_clustering(words, centroids, similarity=similarity, sharpness=0.1)
    _, expected = ops.neural_clustering(words.double(), centroids.double(), similarity=similarity, sharpness=0.1)
    assert (labels == expected).double().mean() > 0.99


def before_and_after_a_later_change(case):
    """Outputs of a case, and of the same with another last two thirds; the number of the first token of these."""
    before, place = case.run()[0], N // 3
    for leaf in ("query", "key", "value"):
        case.leaves[leaf][:, :, place:] += 3.0
    return before, case.run()[0], place


@pytest.mark.parametrize("name", ["causal slices", "strictly causal sorted blocks", *CAUSAL])
def test_no_output_depends_on_a_later_token(name, gpu):
    before, after, place = before_and_after_a_later_change(make(name, gpu))
    assert torch.equal(after[:, :, :place], before[:, :, :place])
    assert not torch.equal(after[:, :, place], before[:, :, place])


@pytest.mark.parametrize("name", CAUSAL)
def test_no_output_depends_on_a_later_token_but_for_rounding(name, gpu):
    """PyTorch, which float64 runs in, adds up the members of a cluster in no fixed order: this changes no label."""
    before, after, place = before_and_after_a_later_change(make(name, gpu, torch.float64))
    torch.testing.assert_close(after[:, :, :place], before[:, :, :place], rtol=0, atol=1e-9)
    assert (after[:, :, place] - before[:, :, place]).abs().max() > 0.1


@each_case
def test_cuda_graph_replays_on_new_inputs_without_a_host_sync(name, gpu, captured):
    case = make(name, gpu)
    case.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, (output, *_) = captured(case.run)
    before = case.run()[0].clone()
    first = next(iter(case.leaves.values()))
    first.copy_(first.flip(-2))
    graph.replay()
    torch.testing.assert_close(output, case.run()[0], rtol=0, atol=0)
    assert not torch.equal(output, before)


@each_case
def test_cuda_graph_of_forward_and_backward_pass(name, gpu, captured):
    """Gradients of the first input are compared: those of keys may be summed in no fixed order."""
    case = make(name, gpu)
    leaves = {leaf: tensor.detach().requires_grad_() for leaf, tensor in case.leaves.items()}
    first = next(iter(leaves.values()))

    def run():
        output = case.run(leaves)[0]
        return torch.autograd.grad(output, first, output.detach())[0]

    graph, gradient = captured(run)
    with torch.no_grad():
        first.copy_(first.flip(-2))
    graph.replay()
    torch.testing.assert_close(gradient, run(), rtol=0, atol=0)


@with_dropout
def test_dropout_is_drawn_from_torch_and_the_gradient_is_of_the_same_draw(name, gpu):
    """The output is linear in the values for a fixed draw: its gradient must give it back (Euler)."""
    case = make(name, gpu, torch.float32)
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        value = case.leaves["value"].detach().requires_grad_()
        output = case.run(case.leaves | {"value": value}, dropout_p=0.3)[0]
        total = (output * output.detach()).sum()
        (gradient,) = torch.autograd.grad(total, value)
        torch.testing.assert_close((gradient * value).double().sum(), total.double(), rtol=1e-4, atol=0)
        outputs.append(output.detach())
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], case.run(dropout_p=0.3)[0])


@with_dropout
def test_cuda_graph_draws_new_dropout_at_every_replay(name, gpu, captured):
    case = make(name, gpu)
    graph, (output, *_) = captured(lambda: case.run(dropout_p=0.2))
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(output, first)


@with_dropout
def test_keys_and_values_of_one_head_expanded_to_all(name, gpu):
    case = make(name, gpu)
    expanded = {leaf: case.leaves[leaf][:, :1].expand(-1, H, -1, -1) for leaf in ("key", "value")}
    copied = {leaf: tensor.contiguous() for leaf, tensor in expanded.items()}
    assert torch.equal(case.run(case.leaves | expanded)[0], case.run(case.leaves | copied)[0])


@each_case
def test_deterministic_when_torch_is_told_to_be(name, gpu, deterministic):
    case = make(name, gpu)
    first = case.with_gradients(case.leaves)
    for _ in range(2):
        for result, again in case.with_gradients(case.leaves).items():
            assert torch.equal(again, first[result]), result


@each_case
def test_tensors_on_another_than_the_current_device(name, gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here = make(name, torch.device("cuda", 0)).run()[0]
    case = make(name, torch.device("cuda", 1))
    assert torch.equal(case.run()[0].cpu(), here.cpu())
    assert all(result.device.index == 1 for result in case.with_gradients(case.leaves).values())
