"""A tolerance: a few queries computed exactly tell which heads are to be: reproducibly, by text, without a leak."""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import batch_for, encoded, tiny_model

import hf_effattn
from hf_effattn.measuring.errors import head_errors
from hf_effattn.patching.measured import last_measured
from hf_effattn.patching.measurements import RECORD, measurements_of
from hf_effattn.patching.methods import make_method
from hf_effattn.patching.model_types.stacks import find_stacks
from hf_effattn.patching.tolerance import FIRST, SAMPLED, MethodOutput, neighbours, sampled_rows

SETTINGS: dict[str, Any] = {"clusters": 6, "topk": 4, "key_clusters": 5, "max_predicted_error": None, "min_length": 0}


def tensors(length: int, heads: int = 3, key_heads: int = 3, texts: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    counts = heads, key_heads, key_heads
    return [1.5 * torch.randn(texts, count, length, 8, generator=generator) for count in counts]


def left_padded(length: int, padded: int) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :padded] = False
    return mask


@pytest.mark.parametrize("length", [3, SAMPLED, 500, 8192])
def test_samples_are_spread_over_the_text(length: int) -> None:
    (rows,) = sampled_rows(length, None, torch.device("cpu"))
    assert len(rows) == min(SAMPLED, length) == len(rows.unique())
    stretch = length / len(rows)
    assert all(part * stretch - 1 < row < (part + 1) * stretch for part, row in enumerate(rows.tolist()))
    assert torch.equal(rows, sampled_rows(length, None, torch.device("cpu"))[0])


def test_samples_of_a_padded_text_are_its_own() -> None:
    mask = torch.ones(3, 400, dtype=torch.bool)
    mask[0, :230], mask[1, 301:], mask[2] = False, False, torch.arange(400) % 3 == 1
    rows = sampled_rows(400, mask, torch.device("cpu"))
    assert mask.gather(1, rows).all()
    # A text that is padded gives the same tokens as alone.
    assert torch.equal(rows[1], sampled_rows(301, None, torch.device("cpu"))[0])
    assert torch.equal(rows[0] - 230, sampled_rows(170, None, torch.device("cpu"))[0])
    assert not sampled_rows(400, torch.zeros(1, 400, dtype=torch.bool), torch.device("cpu")).lt(0).any()


@pytest.mark.parametrize(
    ("padded", "causal", "key_heads"), [(0, False, 3), (20, False, 1), (0, True, 1), (20, True, 3)]
)
def test_all_queries_of_a_short_text_give_the_error_itself(padded: int, causal: bool, key_heads: int) -> None:
    length = SAMPLED
    query, key, value = tensors(length, key_heads=key_heads)
    mask = left_padded(length, padded)
    result = torch.randn(2, 3, length, 8, generator=torch.Generator().manual_seed(1))
    error, bound = MethodOutput(query, key, value, mask, None, causal, result).sampled_errors()
    visible = mask[:, None, None] & (torch.ones(length, length).tril().bool() if causal else torch.tensor(True))
    exact = F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True).transpose(1, 2)
    # The padded text's 44 queries are drawn with repetition.
    for text in (1,) if padded else (0, 1):
        expected = head_errors(exact[[text]], result.transpose(1, 2)[[text]], mask[[text]])
        torch.testing.assert_close(error[text], torch.tensor(expected))
        torch.testing.assert_close(bound[text], error[text])


def test_the_sample_tells_the_error_and_the_margin_covers_it() -> None:
    query, key, value = tensors(1500, heads=24, key_heads=24)
    result = make_method("bi-clustered", **SETTINGS).run(query, key, value)
    attended = MethodOutput(query, key, value, None, None, False, result)
    exact = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    true = torch.tensor([head_errors(exact[[text]], result.transpose(1, 2)[[text]], None) for text in range(2)])
    error, bound = attended.sampled_errors()
    assert (error / true).log().abs().max() < 0.4
    assert (bound >= error).all()
    inside = [float((attended.sampled_errors(margin)[1] >= true).float().mean()) for margin in (0.0, 1.0, 3.0)]
    assert inside == sorted(inside)
    assert inside[1] > 0.7
    assert inside[2] > 0.9


@pytest.mark.parametrize(("method", "padded"), [("clustered", 0), ("i-clustered", 30), ("bi-clustered", 30)])
def test_heads_above_the_tolerance_are_exact(method: str, padded: int) -> None:
    query, key, value = tensors(200, heads=4, key_heads=2)
    query[:, 0] *= 3  # needs more than the others
    mask = left_padded(200, padded)
    settings = {name: given for name, given in SETTINGS.items() if hasattr(make_method(method), name)}
    module = torch.nn.Identity().eval()
    plain = make_method(method, **settings).run(query, key, value, key_mask=mask)
    checked = make_method(method, **settings, tolerance=0.0)
    exact = (
        F.scaled_dot_product_attention(query, key, value, mask[:, None, None], enable_gqa=True)
        * mask[:, None, :, None]
    )
    torch.testing.assert_close(checked.run(query, key, value, key_mask=mask), exact)
    attended = MethodOutput(query, key, value, mask, None, False, plain)
    tolerance = float(attended.sampled_errors()[1].flatten().sort().values[3:5].mean())
    output = make_method(method, **settings, tolerance=tolerance).run(query, key, value, key_mask=mask, module=module)
    measured = attended.sampled_errors(tolerance=tolerance)[1]
    above = measured > tolerance
    assert above.any(dim=1).all()
    assert not above.all(dim=1).any()
    for text, head in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        expected = exact if above[text, head] else plain
        torch.testing.assert_close(output[text, head], expected[text, head])
    (kept,) = measurements_of(module).calls
    assert torch.equal(kept.exact, above)
    assert torch.equal(kept.bound, measured)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every call of SDPA, the rows of all heads, and of one."""
    calls: list[tuple[int, int]] = []
    attend = F.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        calls.append((query.shape[:3].numel(), query.shape[2]))
        return attend(query, *args, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize("padded", [0, 30])
def test_heads_that_are_exact_anyway_are_not_computed_again(padded: int, computed: list[tuple[int, int]]) -> None:
    query, key, value = tensors(200, heads=4, key_heads=2)
    mask = left_padded(200, padded)
    candidates = [{"method": "bi-clustered", **SETTINGS}]
    module = torch.nn.Identity().eval()
    heads = make_method("per-head", candidates=candidates, heads=[[0, 1]], min_length=0)
    output = heads.run(query, key, value, key_mask=mask)
    error, bound = MethodOutput(query, key, value, mask, None, False, output).first_errors()
    computed.clear()
    replace(heads, tolerance=1e3).run(query, key, value, key_mask=mask, module=module)
    (kept,) = measurements_of(module).calls
    samples = [rows for rows, length in computed if length < 200]
    assert sum(samples) == 2 * 2 * 16  # of two texts the heads that are clustered
    torch.testing.assert_close(kept.error[:, :2], error[:, :2])
    torch.testing.assert_close(kept.bound[:, :2], bound[:, :2])
    assert error[:, :2].min() > 0
    assert not kept.error[:, 2:].any()
    assert not kept.bound[:, 2:].any()


def patched(model_type: str = "bert", **settings: Any) -> Any:
    return hf_effattn.patch_attention(tiny_model(model_type), "bi-clustered", **SETTINGS | settings)


def test_measured_error_is_that_of_the_last_pass() -> None:
    model = patched(tolerance=1e3)
    with pytest.raises(ValueError, match="nothing in BertModel measures its error"):
        hf_effattn.measured_error(tiny_model("bert"))
    assert hf_effattn.measured_error(model) == {}
    batch = batch_for(model, padding="right")
    encoded(model, batch)
    measured = hf_effattn.measured_error(model)
    assert list(measured) == [0, 1, 2]
    assert all(m.error.shape == (2, 2) and m.error.min() > 0 and not m.exact.any() for m in measured.values())
    encoded(model, batch)
    assert torch.equal(hf_effattn.measured_error(model)[2].error, measured[2].error)
    # A pass that runs exact attention measures nothing.
    encoded(model, batch_for(model, length=4))
    assert hf_effattn.measured_error(model) == {}
    hf_effattn.patch_attention(model, "bi-clustered", **SETTINGS)
    with pytest.raises(ValueError, match="nothing in BertModel measures"):
        hf_effattn.measured_error(model)
    hf_effattn.unpatch_attention(patched(tolerance=0.1))


def forget_patch(model: Any) -> None:
    """As a model that transformers loads with `attn_implementation=` the name of the method."""
    for module in model.modules():
        vars(module).pop(RECORD, None)


@pytest.mark.compatibility("datasets", "`map`: the fingerprint of a patched model stays", "runs")
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("model_type", ["bert", "albert"])
def test_what_was_measured_is_no_state_of_the_model(model_type: str, by_name: bool) -> None:
    """A function with the model in it has one fingerprint, by which `datasets.map` finds its results again."""
    model = patched(model_type, tolerance=1e3)
    if by_name:
        forget_patch(model)
    pickled, batch = pickle.dumps(model), batch_for(model)
    for _ in range(2):
        output = encoded(model, batch)
        assert pickle.dumps(model) == pickled
    if not by_name:  # layers that share a module are told apart
        measured = hf_effattn.measured_error(model)
        assert list(measured) == [0, 1, 2]
        assert len({float(layer.error[0, 0]) for layer in measured.values()}) == 3
    for other in (copy.deepcopy(model), pickle.loads(pickled)):
        assert not any(measurements_of(module).calls for module in other.modules())
        assert torch.equal(encoded(other, batch), output)
        hf_effattn.unpatch_attention(other)
    assert last_measured(find_stacks(model)[0].modules[0]) is not None


def test_replicas_of_a_module_keep_their_own() -> None:
    """Those of `nn.DataParallel`, which share its attributes, run at once, each on a part of the batch."""
    module = find_stacks(patched(tolerance=0.1))[0].modules[0]
    replica = module._replicate_for_data_parallel()
    assert measurements_of(replica) is measurements_of(replica)
    assert measurements_of(replica) is not measurements_of(module)


def test_a_text_in_a_batch_is_checked_as_alone() -> None:
    together = [*tensors(400), torch.randn(2, 3, 400, 8, generator=torch.Generator().manual_seed(1))]
    alone = [tensor[:1, :, 150:] for tensor in together]
    of_batch = MethodOutput(*together[:3], left_padded(400, 150), None, False, together[3])
    of_text = MethodOutput(*alone[:3], None, None, False, alone[3])
    for batched, alone in zip(of_batch.sampled_errors(), of_text.sampled_errors(), strict=True):
        torch.testing.assert_close(batched[:1], alone)

    # Its heads are told by the first queries or by all of them, whatever the other text's are.
    first = of_batch.first_errors()[1]
    between = first.flatten().sort().values.unfold(0, 2, 1).mean(dim=1)
    for tolerance in between.tolist():
        batched, alone = (attended.sampled_errors(tolerance=tolerance)[1] for attended in (of_batch, of_text))
        torch.testing.assert_close(batched[:1], alone)
        torch.testing.assert_close(batched[first <= tolerance], first[first <= tolerance])


def with_errors(size: float, rows: torch.Tensor) -> MethodOutput:
    """Attention of one text whose rows `(H, N)` are off by that part of their size, the others by a fortieth."""
    heads, length = rows.shape
    query, key, value = (tensor[:1] for tensor in tensors(length, heads, heads))
    exact = F.scaled_dot_product_attention(query, key, value)
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    noise *= exact.norm(dim=3, keepdim=True) / noise.norm(dim=3, keepdim=True)
    off = torch.where(rows, size, 0.025)[None, :, :, None]
    return MethodOutput(query, key, value, None, None, False, exact + off * noise)


def test_the_first_queries_tell_of_heads_well_within_and_no_others(computed: list[tuple[int, int]]) -> None:
    def sampled(attended: MethodOutput, tolerance: float) -> tuple[torch.Tensor, int]:
        """The bounds `(B, H)`, and how many rows were computed for them."""
        computed.clear()
        _, bound = attended.sampled_errors(tolerance=tolerance)
        return bound, sum(rows for rows, _ in computed)

    rows = torch.zeros(5, 1000, dtype=torch.bool)
    rows[1], rows[3, ::2] = True, True  # off by .1 everywhere, and in every other row
    attended = with_errors(0.1, rows)
    first, all_rows = attended.first_errors()[1], attended.sampled_errors()[1]
    few = len(range(SAMPLED)[FIRST])
    for tolerance, undecided in (0.15, []), (0.09, [1, 3]), (0.02, [0, 1, 2, 3, 4]):
        bound, count = sampled(attended, tolerance)
        assert count == few * 5 + (SAMPLED - few) * len(undecided)
        expected = first.clone()
        expected[:, undecided] = all_rows[:, undecided]
        torch.testing.assert_close(bound, expected)
    # One query holds the error: others like it may have been missed.
    rows[2, sampled_rows(1000, None, rows.device)[0][FIRST][5]] = True
    one_query = with_errors(0.2, rows & (torch.arange(5) == 2)[:, None])
    assert one_query.first_errors()[0].max() < 0.1
    bound, count = sampled(one_query, 0.2)
    assert count == few * 5 + SAMPLED - few
    torch.testing.assert_close(bound[:, 2], one_query.sampled_errors()[1][:, 2])
    # Where nothing is decided, and where the future is masked, all of them tell.
    attended.causal = True
    assert torch.equal(attended.sampled_errors(tolerance=0.15)[1], attended.sampled_errors()[1])
    module = torch.nn.Identity().eval()
    attended.causal = False
    attended.checked(0.15, None, module)
    torch.testing.assert_close(measurements_of(module).calls[0].bound, all_rows)


def test_a_head_that_is_off_at_few_queries_is_found() -> None:
    heads, length, tolerance = 30, 1200, 0.1
    rows = torch.zeros(heads, length, dtype=torch.bool)
    for head in range(heads - 6):  # a stretch of an eighth, wherever it lies
        start = head * (length - length // 8) // (heads - 7)
        rows[head, start : start + length // 8] = True
    rows[heads - 6 : -3] = torch.rand(3, length, generator=torch.Generator().manual_seed(2)) < 0.25
    attended = with_errors(0.6, rows)
    bound = attended.sampled_errors(tolerance=tolerance)[1][0]
    assert (bound[:-3] > tolerance).all()
    assert (bound[-3:] < tolerance).all()
    output = attended.checked(tolerance, "exact", None)
    exact = F.scaled_dot_product_attention(attended.query, attended.key, attended.value)
    torch.testing.assert_close(output[:, :-3], exact[:, :-3])
    assert torch.equal(output[:, -3:], attended.result[:, -3:])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("causal", "key_heads"), [(False, 6), (True, 2)])
def test_threads_share_heads_or_rows(
    causal: bool, key_heads: int, threads: int, on_threads: Callable[[int], None]
) -> None:
    query, key, value = tensors(300, heads=6, key_heads=key_heads)
    mask = left_padded(300, 40)
    result = torch.randn(2, 6, 300, 8, generator=torch.Generator().manual_seed(1))
    attended = MethodOutput(query, key, value, mask, None, causal, result)
    rows = sampled_rows(300, mask, query.device)
    one_by_one = torch.zeros(2, 6, dtype=torch.bool)
    one_by_one[1, 3] = True
    several = torch.tensor([[True, True, False, True, False, False], [False] * 5 + [True]])
    visible = mask[:, None, None] & (torch.ones(300, 300).tril().bool() if causal else torch.tensor(True))
    exact = F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
    on_threads(threads)
    masks = {"all": None, "one": one_by_one, "some": several}
    squares = {name: attended._squares(rows, heads) for name, heads in masks.items()}
    index = rows[:, None, :, None].expand(-1, 6, -1, 8)
    expected = torch.stack([(result - exact).gather(2, index), exact.gather(2, index)]).square().sum(dim=4)
    torch.testing.assert_close(squares["all"], expected)
    for name, heads in ("one", one_by_one), ("some", several):
        torch.testing.assert_close(squares[name][:, heads], expected[:, heads])
        assert not squares[name][0][~heads].any()


def test_neighbouring_heads_of_a_text_run_together() -> None:
    pairs = [(0, 1), (0, 2), (0, 4), (1, 5), (1, 6)]
    together = [(0, 1, 3), (0, 4, 5), (1, 5, 7)]
    for group, expected in (1, together), (2, [(text, head, head + 1) for text, head in pairs]):
        runs = [(texts.start, heads.start, heads.stop) for texts, heads in neighbours(pairs, group)]
        assert runs == expected
        assert neighbours([], group) == []


def test_exact_warn_or_raise() -> None:
    exact = tiny_model("bert")
    batch = batch_for(exact, padding="left")
    expected = encoded(exact, batch)
    model = patched(tolerance=0)
    torch.testing.assert_close(encoded(model, batch), expected, rtol=1e-4, atol=1e-5)
    assert all(layer.exact.all() for layer in hf_effattn.measured_error(model).values())

    plain = encoded(patched(), batch)
    with pytest.warns(UserWarning, match="the error of heads .* the tolerance is 0") as caught:
        warned = encoded(patched(tolerance=0, on_excess="warn"), batch)
    assert {Path(warning.filename).name for warning in caught} == {"tiny_models.py"}  # which calls the model
    assert torch.equal(warned, plain)
    with pytest.raises(RuntimeError, match='take on_excess="exact"'):
        encoded(patched(tolerance=0, on_excess="raise"), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for on_excess in ("warn", "raise"):
            encoded(patched(tolerance=1e3, on_excess=on_excess), batch)
    for given, match in ({"on_excess": "stop"}, "on_excess must be one of"), ({"tolerance": -1}, "at least 0"):
        with pytest.raises(ValueError, match=match):
            patched(**given)
    with pytest.raises(TypeError, match="tolerance must be a number or None"):
        patched(tolerance="much")
    with pytest.raises(ValueError, match="takes no tolerance"):
        hf_effattn.patch_attention(tiny_model("bert"), "cst", tolerance=0.1)


def test_training_measures_and_nothing_else() -> None:
    batch = batch_for(tiny_model("bert"))
    changes = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = hf_effattn.patch_attention(tiny_model("bert", **changes).train(), "bi-clustered", **SETTINGS, tolerance=0)
    output = encoded(model, batch)
    output.sum().backward()
    assert torch.equal(output, encoded(patched(), batch))
    assert not any(layer.exact.any() for layer in hf_effattn.measured_error(model).values())
    # Attention dropout is no error: nothing is measured then.
    dropping = hf_effattn.patch_attention(tiny_model("bert").train(), "bi-clustered", **SETTINGS, tolerance=0)
    encoded(dropping, batch)
    assert hf_effattn.measured_error(dropping) == {}


def test_gradients_go_through_what_was_computed_exactly() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in tensors(90)]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).square().sum(), inputs)
    checked = make_method("bi-clustered", **SETTINGS, tolerance=0)
    torch.testing.assert_close(torch.autograd.grad(checked.run(*inputs).square().sum(), inputs), exact)


def test_a_decision_never_tells_of_the_future() -> None:
    local = {"segment_length": 4, "window": 4, "exact_keys": 24, "key_clusters": 3, "max_predicted_error": None}
    inputs = tensors(120)
    strict = make_method("bi-clustered", causal=True, **local, min_length=0, tolerance=0.0)
    module = torch.nn.Identity().eval()
    before = strict.run(*inputs, causal=True, prompt=False, module=module)
    assert not measurements_of(module).calls[0].exact.any()
    assert measurements_of(module).calls[0].error.max() > 0.01
    for tensor in inputs:
        tensor[:, :, 100:] += 1
    assert torch.equal(before[:, :, :100], strict.run(*inputs, causal=True, prompt=False)[:, :, :100])
    exact = F.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(strict.run(*inputs, causal=True, prompt=True), exact)


def test_weights_are_those_of_the_output() -> None:
    model, exact = patched(tolerance=0), tiny_model("bert")
    exact.set_attn_implementation("eager")
    batch = batch_for(model)
    with torch.no_grad():
        weights = model(**batch.inputs, output_attentions=True).attentions
        expected = exact(**batch.inputs, output_attentions=True).attentions
    for actual, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_measures_and_nothing_else() -> None:
    """Of two models in turn it is compiled once."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, other, batch = patched(tolerance=0), patched(tolerance=1e3), batch_for(tiny_model("bert"))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        output = compiled(**batch.inputs).last_hidden_state
        torch.testing.assert_close(output.flatten(0, 1), encoded(patched(), batch), rtol=1e-3, atol=1e-4)
        other(**batch.inputs)
    assert len(graphs) == 1
    measured = hf_effattn.measured_error(model)
    assert list(measured) == [0, 1, 2]
    assert not any(layer.exact.any() for layer in measured.values())
    assert min(float(layer.error.min()) for layer in measured.values()) > 0
