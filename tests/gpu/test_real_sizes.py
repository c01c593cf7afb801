"""The Triton kernels on a GPU at the sizes that they are made for: values, gradients, graphs, no synchronisation."""

from dataclasses import dataclass

import pytest
import torch
from support.closeness import assert_close_to_reference
from transformers import RobertaConfig, RobertaForMaskedLM

from hf_effattn import ops, patch_attention
from hf_effattn.patching.methods import make_method

OPS = ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")


@dataclass(frozen=True)
class Size:
    """Sizes of one test; `padded` tokens at the end of the last item are masked."""

    name: str
    B: int = 1
    H: int = 8
    key_heads: int = 8
    N: int = 4096
    D: int = 64
    clusters: int = 100
    topk: int = 32
    padded: int = 0


SIZES = (
    Size("base"),
    Size("odd", B=2, H=3, key_heads=3, N=5003, D=80, padded=1777),
    Size("grouped", H=16, key_heads=4, N=8192, D=128, clusters=128, topk=128),
    Size("wide", H=4, key_heads=4, D=256),
    Size("not_a_power_of_two", H=2, key_heads=1, N=2050, D=200),
    Size("many_clusters", H=2, key_heads=2, N=16384, clusters=1024, topk=1024),
)
KEY_CLUSTERS = 48
each_op = pytest.mark.parametrize("op", OPS)
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)


def make_tensors(size, device, dtype):
    """Query, key and value as transformers hands them over, labels from K-means, masks."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(size.B, size.N, heads, size.D, device=device, generator=generator).to(dtype).transpose(1, 2)
        for heads in (size.H, size.key_heads, size.key_heads)
    )
    mask = None
    if size.padded:
        mask = torch.ones(size.B, size.N, dtype=torch.bool, device=device)
        mask[-1, -size.padded :] = False
    return query, key, value, mask


def separate_top_keys(query, key, topk):
    """Make some keys stand out for every query, in place, so that no dtype's rounding decides which ones do."""
    generator = torch.Generator(key.device).manual_seed(2)
    group = query.shape[1] // key.shape[1]
    direction = torch.randn(1, key.shape[1], 1, key.shape[3], device=key.device, generator=generator)
    direction /= direction.norm(dim=3, keepdim=True)
    key[:, :, :topk] += 24 * direction
    query += 2 * direction.repeat_interleave(group, dim=1)


def options(op, size, mask, device):
    """Keyword arguments of an op."""
    chosen = {"clusters": size.clusters, "key_mask": mask, "query_mask": mask}
    if op != "clustered_attention":
        chosen["topk"] = size.topk
    if op == "bi_clustered_attention":
        # Of no cluster's kin: then the keys that stand out are what their clusters represent worst.
        shape = size.B, size.key_heads, size.N
        chosen["key_clusters"] = KEY_CLUSTERS
        chosen["key_labels"] = (torch.arange(size.N, device=device) % KEY_CLUSTERS).expand(shape)
    return chosen


def with_gradients(op, tensors, labels, backend, **chosen):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = getattr(ops, op)(*leaves, labels, backend=backend, **chosen)
    generator = torch.Generator(output.device).manual_seed(1)
    weights = torch.randn(output.shape, device=output.device, generator=generator)
    gradients = torch.autograd.grad(output, leaves, weights.to(output.dtype))
    return dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))


def assert_as_close_as_batched(op, tensors, labels, chosen):
    """The kernels are as close to float64 as PyTorch's operations in the same dtype, values and gradients."""
    expected = with_gradients(op, [tensor.double() for tensor in tensors], labels, "batched", **chosen)
    baseline = with_gradients(op, tensors, labels, "batched", **chosen)
    actual = with_gradients(op, tensors, labels, "triton", **chosen)
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-5)


@each_op
@each_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(op, size, dtype, gpu):
    *tensors, mask = make_tensors(size, gpu, dtype)
    labels = ops.cluster_queries(tensors[0].float(), size.clusters, query_mask=mask)
    separate_top_keys(*tensors[:2], size.topk)
    chosen = options(op, size, mask, gpu)
    assert_as_close_as_batched(op, tensors, labels, chosen)


@each_op
def test_all_queries_in_one_cluster(op, gpu):
    """Its programs are the only ones with work; the first of the other clusters' are empty."""
    size = Size("one_cluster", H=16, key_heads=16, N=16384)
    *tensors, mask = make_tensors(size, gpu, torch.bfloat16)
    labels = torch.full((size.B, size.H, size.N), 3, device=gpu)
    separate_top_keys(*tensors[:2], size.topk)
    chosen = options(op, size, mask, gpu)
    assert_as_close_as_batched(op, tensors, labels, chosen)


@each_op
def test_deterministic_when_torch_is_told_to_be(op, gpu, deterministic):
    size = Size("deterministic", H=16, key_heads=4, N=16384, clusters=100)
    *tensors, mask = make_tensors(size, gpu, torch.bfloat16)
    labels = ops.cluster_queries(tensors[0], size.clusters)
    chosen = options(op, size, mask, gpu)
    first = with_gradients(op, tensors, labels, "triton", **chosen)
    for _ in range(3):
        for name, again in with_gradients(op, tensors, labels, "triton", **chosen).items():
            assert torch.equal(again, first[name]), name


@each_op
def test_remembered_launches_read_what_they_are_given(op, gpu):
    """Other numbers, and tensors that begin at no multiple of 16 bytes, behind launches of the same sizes."""
    *tensors, _ = make_tensors(SIZES[0], gpu, torch.bfloat16)
    labels = ops.cluster_queries(tensors[0], SIZES[0].clusters)
    chosen = options(op, SIZES[0], None, gpu)

    def moved(tensor):
        """The same numbers and strides, one number further on in memory."""
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=gpu)
        return memory[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)

    def run(tensors):
        return getattr(ops, op)(*tensors, labels, backend="triton", **chosen)

    first, other = run(tensors), run([tensor.flip(2) for tensor in tensors])
    assert not torch.equal(first, other)
    assert torch.equal(run(tensors), first)
    torch.testing.assert_close(run([moved(tensor) for tensor in tensors]), first)


@each_op
def test_keys_and_values_of_one_head_expanded_to_all(op, gpu):
    size = Size("expanded", H=16, key_heads=16, N=16384)
    query, key, value, mask = make_tensors(size, gpu, torch.bfloat16)
    key, value = (tensor[:, :1].expand(-1, size.H, -1, -1) for tensor in (key, value))
    labels = ops.cluster_queries(query, size.clusters)
    chosen = options(op, size, mask, gpu)
    expected = getattr(ops, op)(query, key.contiguous(), value.contiguous(), labels, **chosen)
    assert torch.equal(getattr(ops, op)(query, key, value, labels, **chosen), expected)


@each_size
@pytest.mark.parametrize("method", ["kmeans", "lsh"])
def test_labels_are_as_good_and_never_change(size, method, gpu):
    query, key, _, mask = make_tensors(size, gpu, torch.bfloat16)
    metric = {"key": key, "key_mask": mask} if method == "kmeans" else {}

    def labels(backend):
        return ops.cluster_queries(query, size.clusters, method=method, query_mask=mask, backend=backend, **metric)

    first = labels("triton")
    # Whichever program of a head is the last to arrive at a round of the fit.
    assert all(torch.equal(first, labels("triton")) for _ in range(20))
    assert first.min() >= 0
    assert first.max() < size.clusters
    spread = []
    for found in (first, labels("batched")):
        index = found[..., None].expand(-1, -1, -1, size.D)
        rows = query.float() if mask is None else query.float() * mask[:, None, :, None]
        counts = torch.zeros(*found.shape[:2], size.clusters, device=gpu)
        counts.scatter_add_(2, found, torch.ones_like(found, dtype=counts.dtype))
        sums = torch.zeros(*found.shape[:2], size.clusters, size.D, device=gpu).scatter_add_(2, index, rows)
        means = sums / counts.clamp(min=1)[..., None]
        spread.append((rows - means.gather(2, index)).square().sum().item())
    assert spread[0] < 1.02 * spread[1]


GRAPHS = {
    "clustered": ("clustered", {}),
    "i-clustered": ("i-clustered", {}),
    "i-clustered, LSH": ("i-clustered", {"clustering": "lsh"}),
    "bi-clustered": ("bi-clustered", {}),
    "bi-clustered, every head exact": ("bi-clustered", {"max_predicted_error": 0.0}),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_cuda_graph_replays_on_new_inputs_without_a_host_sync(name, gpu, captured):
    method, chosen = GRAPHS[name]
    size = Size("graph", padded=100)
    query, key, value, mask = make_tensors(size, gpu, torch.bfloat16)
    settings = make_method(method, min_length=0, **chosen)

    def run():
        return settings.run(query, key, value, key_mask=mask)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, output = captured(run)
    before = run().clone()
    query.copy_(query.flip(2))
    graph.replay()
    torch.testing.assert_close(output, run(), rtol=0, atol=0)
    assert not torch.equal(output, before)


@each_op
def test_cuda_graph_of_forward_and_backward_pass(op, gpu, captured):
    """Query gradients are compared: the order in which keys shared by clusters get theirs is not fixed."""
    size = Size("graph", N=2048)
    *tensors, mask = make_tensors(size, gpu, torch.bfloat16)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    labels = ops.cluster_queries(tensors[0], size.clusters)
    chosen = options(op, size, mask, gpu)

    def run():
        output = getattr(ops, op)(*leaves, labels, **chosen)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    graph, gradients = captured(run)
    with torch.no_grad():
        leaves[2].copy_(leaves[2].flip(2))
    graph.replay()
    torch.testing.assert_close(gradients[0], run()[0], rtol=0, atol=0)


@each_op
def test_cuda_graph_draws_new_dropout_at_every_replay(op, gpu, captured):
    size = Size("graph", N=2048)
    *tensors, mask = make_tensors(size, gpu, torch.bfloat16)
    labels = ops.cluster_queries(tensors[0], size.clusters)
    chosen = options(op, size, mask, gpu) | {"dropout_p": 0.2}
    graph, output = captured(lambda: getattr(ops, op)(*tensors, labels, **chosen))
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(output, first)


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


@each_op
def test_compiles_as_one_graph(op, gpu):
    size = Size("compiled", N=1024)
    *tensors, mask = make_tensors(size, gpu, torch.bfloat16)
    labels = ops.cluster_queries(tensors[0], size.clusters)
    chosen = options(op, size, mask, gpu)
    compiled = torch.compile(getattr(ops, op), fullgraph=True)
    expected = getattr(ops, op)(*tensors, labels, **chosen)
    torch.testing.assert_close(compiled(*tensors, labels, **chosen), expected, rtol=0, atol=0)


def test_a_gpu_picks_the_kernels_by_itself(gpu):
    size = Size("choice", N=512, clusters=16)
    *tensors, _ = make_tensors(size, gpu, torch.bfloat16)
    labels = ops.cluster_queries(tensors[0], size.clusters)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.clustered_attention(*tensors, labels, clusters=size.clusters)
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
