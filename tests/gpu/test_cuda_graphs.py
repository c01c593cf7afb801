"""`cuda_graph="auto"` on a GPU: captured attention is, bit for bit, the attention that is started kernel by kernel."""

import warnings

import pytest
import torch
from transformers import GPT2Config, GPT2Model, RobertaConfig, RobertaModel

from hf_effattn import patch_attention
from hf_effattn.patching import cuda_graphs
from hf_effattn.patching.methods import make_method

pytestmark = pytest.mark.filterwarnings("ignore:.*raised the perplexity")
CANDIDATES = [{"method": "bi-clustered"}, {"method": "i-clustered", "clusters": 25}]
LOCAL = {"causal": True, "segment_length": 256, "window": 128}
CASES = {
    "clustered": {"method": "clustered"},
    "i-clustered": {"method": "i-clustered"},
    "i-clustered, LSH": {"method": "i-clustered", "clustering": "lsh"},
    "bi-clustered": {"method": "bi-clustered"},
    "per-head": {"method": "per-head", "candidates": CANDIDATES, "heads": [[0, 1, 2, 0]]},
    "cst": {"method": "cst"},
    "causal clustered": {"method": "clustered", "clusters": 32} | LOCAL,
    "causal i-clustered": {"method": "i-clustered", "clusters": 32, "exact_keys": 64} | LOCAL,
    "causal bi-clustered": {"method": "bi-clustered", "exact_keys": 64, "key_clusters": 8} | LOCAL,
}


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch):
    """Each test begins without graphs and without an earlier failure; none may fail to be captured."""
    monkeypatch.setattr(cuda_graphs, "_devices", {})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message=".*could not be captured")
        yield


def tensors(device, seed=0, length=2048, dtype=torch.bfloat16):
    """As a projection of all three leaves them: neighbours in memory."""
    generator = torch.Generator(device).manual_seed(seed)
    packed = torch.randn(2, length, 3, 4, 64, generator=generator, device=device).to(dtype)
    return [packed[:, :, part].transpose(1, 2) for part in range(3)]


def both(case="i-clustered"):
    settings = CASES[case] | {"min_length": 0}
    return make_method(**settings, cuda_graph="auto"), make_method(**settings)


def captured_graphs():
    return [graph for graphs in cuda_graphs._devices.values() for graph in graphs._known.values() if graph is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_replays_are_the_same_bit_for_bit(case, masked, dtype, gpu):
    graphed, plain = both(case)
    for seed in range(4):
        for length in (2048, 1500):
            given = tensors(gpu, seed, length, dtype)
            tokens = torch.tensor([[length - 100 * seed], [length]], device=gpu)
            options = {"causal": bool(plain.causal), "scale": 0.1}
            options["key_mask"] = torch.arange(length, device=gpu) < tokens if masked else None
            assert torch.equal(graphed.run(*given, **options), plain.run(*given, **options))
    assert len(captured_graphs()) == 2


def roberta():
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 512}
    return RobertaModel(RobertaConfig(**sizes, max_position_embeddings=2050, vocab_size=1000))


def gpt2():
    sizes = {"n_embd": 256, "n_head": 4, "n_layer": 3, "n_positions": 2048}
    return GPT2Model(GPT2Config(**sizes, vocab_size=1000, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize(("make", "method"), [(roberta, "i-clustered"), (roberta, "cst"), (gpt2, "bi-clustered")])
def test_hooks_keep_the_outputs_of_layers_that_share_a_graph(make, method, gpu):
    torch.manual_seed(0)
    model = make().eval().to(gpu, torch.bfloat16)
    words = [torch.randint(5, 1000, (2, length), device=gpu) for length in (2048, 1800, 2048)]
    states = {}
    for graph in ("never", "auto"):
        patch_attention(model, method, min_length=0, cuda_graph=graph)
        states[graph] = [state for ids in words for state in model(ids, output_hidden_states=True).hidden_states]
    assert len(captured_graphs()) == 2
    assert all(torch.equal(*pair) for pair in zip(*states.values(), strict=True))


def test_within_another_capture_kernels_are_captured_one_by_one(gpu, captured):
    graphed, plain = both()
    given = tensors(gpu)
    graphed.run(*given)
    graphed.run(*given)
    outer, output = captured(lambda: graphed.run(*given))
    for tensor, other in zip(given, tensors(gpu, seed=1), strict=True):
        tensor.copy_(other)
    outer.replay()
    assert torch.equal(output, plain.run(*tensors(gpu, seed=1)))
    assert len(captured_graphs()) == 1


def test_a_compiled_model_has_graphs_of_its_own(gpu):
    torch.manual_seed(0)
    model = patch_attention(roberta().eval().to(gpu, torch.bfloat16), "i-clustered", min_length=0, cuda_graph="auto")
    words = torch.randint(5, 1000, (2, 2048), device=gpu)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        actual = compiled(words).last_hidden_state.clone()
    assert not captured_graphs()
    expected = model(words).last_hidden_state
    assert captured_graphs()
    assert (actual - expected).norm() < 0.02 * expected.norm()


def test_replays_on_several_streams_do_not_overlap(gpu):
    graphed, plain = both()
    given = [tensors(gpu, seed) for seed in range(4)]
    expected = [plain.run(*each) for each in given]
    graphed.run(*given[0])
    graphed.run(*given[0])
    streams = [torch.cuda.Stream() for _ in given]
    outputs = []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, each in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(graphed.run(*each))
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected[number % 4]) for number, output in enumerate(outputs))


def test_dropped_graphs_leave_their_memory(gpu, monkeypatch):
    """As many lengths again take no more memory: what dropped graphs held is used by new ones."""
    monkeypatch.setattr(cuda_graphs, "MOST_SIGNATURES", 2)
    graphed, plain = both()
    reserved = []
    for _ in range(3):
        for length in (1024, 1536, 2048, 1024, 1536):
            for seed in range(3):
                given = tensors(gpu, seed, length)
                assert torch.equal(graphed.run(*given), plain.run(*given))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] <= reserved[1]


def test_after_a_failed_capture_attention_goes_on_without(gpu, monkeypatch):
    graphed, plain = both()
    group = type(graphed).group

    def waiting(method, query, *args):
        query.sum().item()
        return group(method, query, *args)

    monkeypatch.setattr(type(graphed), "group", waiting)
    given = tensors(gpu)
    graphed.run(*given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outputs = [graphed.run(*given) for _ in range(3)]
    assert sum("could not be captured" in str(warning.message) for warning in told) == 1
    assert all(torch.equal(output, plain.run(*given)) for output in outputs)
    # The device and its allocator still work, for other captures too.
    monkeypatch.undo()
    monkeypatch.setattr(cuda_graphs, "_devices", {})
    assert all(torch.equal(graphed.run(*given), plain.run(*given)) for _ in range(3))
    assert len(captured_graphs()) == 1
