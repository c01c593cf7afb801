"""The kernels of every op with gradients on a GPU, at real sizes.

Values and gradients against the batched form in float64, CUDA graphs, dropout, strides of 0, determinism.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.closeness import assert_close_to_reference
from transformers import RobertaConfig, RobertaForMaskedLM

from hf_effattn import ops, patch_attention
from hf_effattn.patching.methods import make_method

N, H, D, WIDTH, CLUSTERS, KEY_CLUSTERS = 16384, 16, 64, 1024, 181, 48
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
        named = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
        return named | dict(zip(leaves, gradients, strict=True))


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


@dataclass(frozen=True)
class Size:
    """Sizes of attention over clusters; `padded` tokens at the end of the last item are masked."""

    B: int = 1
    heads: int = 8
    key_heads: int = 8
    length: int = 4096
    width: int = 64
    clusters: int = 100
    topk: int = 32
    padded: int = 0
    together: bool = False

    def mask(self, device):
        if not self.padded:
            return None
        mask = torch.ones(self.B, self.length, dtype=torch.bool, device=device)
        mask[-1, -self.padded :] = False
        return mask


def clustered(device, dtype, op, size):
    """Attention over clusters of K-means, or over one, if all are together."""
    generator = torch.Generator(device).manual_seed(0)
    leaves = {
        name: torch.randn(size.B, size.length, heads, size.width, device=device, generator=generator)
        .to(dtype)
        .transpose(1, 2)
        for name, heads in (("query", size.heads), ("key", size.key_heads), ("value", size.key_heads))
    }
    mask = size.mask(device)
    labels = ops.cluster_queries(leaves["query"].float(), size.clusters, query_mask=mask)
    separate_top_keys(leaves["query"], leaves["key"], size.topk)
    chosen = {"clusters": size.clusters, "key_mask": mask, "query_mask": mask}
    chosen["labels"] = torch.full_like(labels, 3) if size.together else labels
    if op != "clustered_attention":
        chosen["topk"] = size.topk
    if op == "bi_clustered_attention":
        # Of no cluster's kin: then the keys that stand out are what their clusters represent worst.
        chosen["key_clusters"] = KEY_CLUSTERS
        chosen["key_labels"] = torch.arange(size.length, device=device) % KEY_CLUSTERS
        chosen["key_labels"] = chosen["key_labels"].expand(size.B, size.key_heads, -1)
    return Case(leaves, lambda **inputs: (getattr(ops, op)(**inputs, **chosen),))


def separate_top_keys(query, key, topk):
    """Make some keys stand out for every query, in place, so that no dtype's rounding decides which ones do."""
    generator = torch.Generator(key.device).manual_seed(2)
    direction = torch.randn(1, key.shape[1], 1, key.shape[3], device=key.device, generator=generator)
    direction /= direction.norm(dim=3, keepdim=True)
    key[:, :, :topk] += 24 * direction
    query += 2 * direction.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


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
SIZES = {
    "base": Size(),
    "odd": Size(B=2, heads=3, key_heads=3, length=5003, width=80, padded=1777),
    "grouped": Size(heads=16, key_heads=4, length=8192, width=128, clusters=128, topk=128),
    "wide": Size(heads=4, key_heads=4, width=256),
    "not a power of two": Size(heads=2, key_heads=1, length=2050, width=200),
    "many clusters": Size(heads=2, key_heads=2, length=16384, clusters=1024, topk=1024),
    # Its programs are the only ones with work; the first of the other clusters' are empty.
    "one cluster": Size(heads=16, key_heads=16, length=16384, together=True),
}
CLUSTERED: dict[str, Callable[..., Case]] = {
    f"{op}, {name}": partial(clustered, op=f"{op}_attention", size=size)
    for op in ("clustered", "improved_clustered", "bi_clustered")
    for name, size in SIZES.items()
}


def by_method(device, dtype, method, **settings):
    """A method as a patched model runs it, the search for clusters with it."""
    chosen = make_method(method, min_length=0, **settings)
    leaves = clustered(device, dtype, "clustered_attention", Size()).leaves
    mask = torch.arange(4096, device=device)[None] < 3996
    return Case(leaves, lambda query, key, value: (chosen.run(query, key, value, key_mask=mask),))


PATCHED: dict[str, Callable[..., Case]] = {
    "by clustered": partial(by_method, method="clustered"),
    "by i-clustered": partial(by_method, method="i-clustered"),
    "by i-clustered, LSH": partial(by_method, method="i-clustered", clustering="lsh"),
    "by bi-clustered": partial(by_method, method="bi-clustered"),
    "by bi-clustered, every head exact": partial(by_method, method="bi-clustered", max_predicted_error=0.0),
}
COMPARED, ALL = CASES | CLUSTERED, CASES | CAUSAL | CLUSTERED
USUAL = [name for name in ALL if name not in CLUSTERED or name.endswith("grouped")]
with_dropout = pytest.mark.parametrize("name", [name for name in USUAL if "neural" not in name])
each_case = pytest.mark.parametrize("name", USUAL)


def make(name, device, dtype=torch.bfloat16):
    return (ALL | PATCHED)[name](device, dtype)


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(name, dtype, gpu):
    case = make(name, gpu, dtype)
    exact = {leaf: tensor.double() for leaf, tensor in case.leaves.items()}
    expected = case.with_gradients(exact, backend="batched")
    baseline = case.with_gradients(case.leaves, backend="batched")
    for result, actual in case.with_gradients(case.leaves, backend="triton").items():
        assert_close_to_reference(
            result, actual, expected[result], baseline[result], rtol=1e-5, factor=2.0 if name in CLUSTERED else 3.0
        )


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


@pytest.mark.parametrize("name", [*USUAL, *PATCHED])
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
    rows = {leaf: case.leaves[leaf] for leaf in ("key", "value")}
    expanded = {leaf: x[:, :1].expand(-1, x.shape[1], -1, -1) for leaf, x in rows.items()}
    copied = {leaf: tensor.contiguous() for leaf, tensor in expanded.items()}
    assert torch.equal(case.run(case.leaves | expanded)[0], case.run(case.leaves | copied)[0])


@each_case
def test_compiles_as_one_graph(name, gpu):
    case = make(name, gpu)
    compiled = torch.compile(case.call, fullgraph=True)
    torch.testing.assert_close(compiled(**case.leaves)[0], case.run()[0], rtol=0, atol=0)


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


@each_case
def test_remembered_launches_read_what_they_are_given(name, gpu):
    """Other numbers, and tensors that begin at no multiple of 16 bytes, behind launches of the same sizes."""
    case = make(name, gpu)

    def moved(tensor):
        """The same numbers and strides, one number further on in memory."""
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=gpu)
        return memory[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)

    ways = {"other": lambda x: x.flip(-2), "same": torch.clone, "moved": moved}
    first = case.run()[0]
    outputs = {way: case.run({leaf: change(x) for leaf, x in case.leaves.items()})[0] for way, change in ways.items()}
    assert not torch.equal(first, outputs["other"])
    assert torch.equal(outputs["same"], first)
    torch.testing.assert_close(outputs["moved"], first)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("method", ["kmeans", "lsh"])
def test_labels_are_as_good_and_never_change(size, method, gpu):
    query, key, _ = clustered(gpu, torch.bfloat16, "clustered_attention", size).leaves.values()
    mask = size.mask(gpu)
    metric = {"key": key, "key_mask": mask} if method == "kmeans" else {}

    def labels(backend):
        return ops.cluster_queries(query, size.clusters, method=method, query_mask=mask, backend=backend, **metric)

    first = labels("triton")
    # Whichever program of a head is the last to arrive at a round of the fit.
    assert all(torch.equal(first, labels("triton")) for _ in range(20))
    assert first.min() >= 0
    assert first.max() < size.clusters
    spread = []
    for assigned in (first, labels("batched")):
        index = assigned[..., None].expand(-1, -1, -1, size.width)
        rows = query.float() if mask is None else query.float() * mask[:, None, :, None]
        counts = torch.zeros(*assigned.shape[:2], size.clusters, device=gpu)
        counts.scatter_add_(2, assigned, torch.ones_like(assigned, dtype=counts.dtype))
        sums = torch.zeros(*assigned.shape[:2], size.clusters, size.width, device=gpu).scatter_add_(2, index, rows)
        means = sums / counts.clamp(min=1)[..., None]
        spread.append((rows - means.gather(2, index)).square().sum().item())
    assert spread[0] < 1.02 * spread[1]


@pytest.mark.parametrize("method", ["i-clustered", "bi-clustered"])
def test_a_patched_model_compiles_with_cuda_graphs_and_trains(method, gpu):
    config = RobertaConfig(
        hidden_size=256, num_attention_heads=4, num_hidden_layers=2, intermediate_size=512, vocab_size=1000,
        max_position_embeddings=2050, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = RobertaForMaskedLM(config).to(gpu, torch.bfloat16)
    patch_attention(model, method, min_length=0)
    ids = torch.randint(3, 1000, (2, 2048), device=gpu)
    with torch.no_grad():
        expected = model(ids).logits
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(ids).logits
    assert (actual - expected).norm() < 0.02 * expected.norm()
    model.gradient_checkpointing_enable()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_a_gpu_picks_the_kernels_by_itself(gpu):
    case = clustered(gpu, torch.bfloat16, "clustered_attention", Size(length=512, clusters=16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        case.run()
    assert any(event.key == "hf_effattn::clustered_attention_triton" for event in profile.key_averages())


@pytest.mark.parametrize("method", ["i-clustered", "bi-clustered"])
def test_more_numbers_than_an_int32_counts(method, gpu):
    """B·H·N·D beyond 2³¹: the last head must be what it is alone."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    B, H, N, D = 1, 40, 2**20, 64
    shared = torch.randn(B, N, H, D, device=gpu, dtype=torch.bfloat16).transpose(1, 2)
    settings = make_method(method, clusters=64, topk=32, min_length=0)
    with torch.no_grad():
        output = settings.run(shared, shared, shared)
        alone = settings.run(*[shared[:, -1:].contiguous()] * 3)
    # Alone, one head's keys are split over more programs: the sums round differently.
    # A head read from a wrong place has nothing in common with it.
    assert (output[:, -1:] - alone).float().norm() < torch.finfo(torch.bfloat16).eps * alone.float().norm()
