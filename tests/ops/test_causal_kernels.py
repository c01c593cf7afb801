"""GPU kernels of causal attention over clusters: on a GPU, else under Triton's interpreter."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import triton
import triton.language as tl
from support.causal_cases import METHODS, Case, attend, exact_heads, make_inputs, make_sinks
from support.closeness import assert_close_to_reference

from hf_effattn.ops import causal_clustered_attention
from hf_effattn.ops.causal_clustered_attention import reference
from hf_effattn.ops.causal_clustered_attention.reference import Settings
from hf_effattn.ops.causal_clustered_attention.triton import clusters, distant_keys
from hf_effattn.ops.causal_clustered_attention.triton.layout import Layout
from hf_effattn.ops.causal_clustered_attention.triton.metric import known_centroids
from hf_effattn.ops.kmeans.reference import cluster_points
from hf_effattn.ops.kmeans.triton import assign
from hf_effattn.ops.kmeans.triton.rows import Rows
from hf_effattn.ops.shared.dropout import CENTROID_WEIGHTS, KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from hf_effattn.ops.shared.triton import chips
from hf_effattn.ops.shared.triton.dropout import dropout_factor
from hf_effattn.ops.shared.triton.sort import cluster_means, sort_by_cluster

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("output", "query", "key", "value", "sinks")
SMALL = Case("plain", B=1, N=37, segment_length=8, window=8)
CASES = (
    SMALL,
    replace(SMALL, name="first_token_beyond_the_window", N=17),
    replace(SMALL, name="whole_segments", N=32, window=3),
    replace(SMALL, name="no_window", window=0),
    replace(SMALL, name="window_of_many_segments", window=17, N=50),
    replace(SMALL, name="segments_of_one_token", segment_length=1, window=3, N=7),
    replace(SMALL, name="segments_of_many_tiles", H=1, segment_length=70, window=40, N=150, clusters=3, topk=40),
    replace(SMALL, name="odd_dimensions", D=20, Dv=40),
    replace(SMALL, name="one_cluster", clusters=1, key_clusters=1),
    replace(
        SMALL,
        name="one_cluster_some_heads_exact",
        clusters=1,
        key_clusters=3,
        H=4,
        key_heads=2,
        max_predicted_error=0.1,
        B=2,
        masks="left",
    ),
    replace(SMALL, name="more_clusters_than_queries", clusters=40, H=1),
    replace(SMALL, name="topk_beyond_keys", topk=99),
    replace(SMALL, name="no_iterations", iterations=0),
    replace(SMALL, name="grouped_heads", H=4, key_heads=2),
    replace(SMALL, name="sinks_of_grouped_heads", H=4, key_heads=2, sinks=True),
    replace(SMALL, name="sinks_and_holes", B=2, N=21, masks="holes", sinks=True),
    replace(SMALL, name="all_heads_exact", max_predicted_error=0.0),
    replace(
        SMALL, name="some_heads_exact", max_predicted_error=0.08, H=4, key_heads=2, clusters=2, key_clusters=2, N=33
    ),
    replace(SMALL, name="right_padding", B=2, H=1, masks="right"),
    replace(SMALL, name="row_fully_padded", B=2, H=1, masks="row", N=30),
    replace(SMALL, name="holes", B=2, H=1, masks="holes"),
    replace(
        SMALL,
        name="some_heads_exact_and_holes",
        B=2,
        max_predicted_error=0.06,
        key_heads=1,
        clusters=2,
        key_clusters=2,
        masks="holes",
    ),
)
each_method = pytest.mark.parametrize("method", METHODS)
# The other methods are the same kernels with less in them.
FEW = ("plain", "no_window", "grouped_heads", "holes")
CALLS = [(method, case) for method in METHODS for case in CASES if method == METHODS[2] or case.name in FEW]


@pytest.mark.parametrize("case", [case for case in CASES if "exact" in case.name], ids=lambda case: case.name)
def test_heads_are_exact_where_a_case_says_so(case):
    exact, heads = exact_heads(case)
    assert 0 < exact < heads or (case.name == "all_heads_exact" and 0 < exact == heads)


@pytest.fixture
def labels_of_the_reference(monkeypatch):
    """Both forms have the same clusters; the kernels' own K-means is tested with `kmeans`."""

    def labels(points, mask, metric, count, layout):
        settings = layout.settings
        found = torch.zeros(points.shape[:3], dtype=torch.int64)
        if metric is None:
            return found.to(points.device)
        own = metric.repeat_interleave(points.shape[0] * points.shape[1] // len(metric), dim=0)
        for place, of_metric in zip(torch.cartesian_prod(*map(torch.arange, points.shape[:2])), own, strict=True):
            item, head = place.tolist()
            rows = slice(None) if mask is None else mask[item].cpu()
            given = (
                points[item, head].cpu().double()[rows],
                count,
                settings.rounds,
                settings.fit_queries,
                settings.seed,
            )
            if len(given[0]):
                found[item, head, rows] = cluster_points(*given, of_metric.cpu().double())[0]
        return found.to(points.device)

    monkeypatch.setattr(clusters, "kmeans_labels", labels)


def run(method, case, inputs, dtype=torch.float32, backend="triton", **options):
    """Output and the gradients of query, key, value and sinks, for a fixed random gradient of it, on the CPU."""
    *tensors, mask = inputs
    leaves = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in tensors]
    sinks = make_sinks(case, dtype)
    if sinks is not None:
        options["sinks"] = sinks.to(DEVICE).requires_grad_()
    output = attend(method, case, *leaves, None if mask is None else mask.to(DEVICE), backend=backend, **options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves += [] if sinks is None else [options["sinks"]]
    gradients = torch.autograd.grad(output, leaves, weights.to(output))
    names = NAMES[: 1 + len(leaves)]
    return dict(zip(names, (tensor.cpu() for tensor in (output.detach(), *gradients)), strict=True))


def check(method, case, inputs, dtype=torch.float32):
    """The kernels' error in `dtype` is what plain PyTorch has there."""
    rounded = [None if part is None else part if part.dtype == torch.bool else part.to(dtype) for part in inputs]
    expected = run(method, case, rounded, torch.float64, "reference")
    baseline = run(method, case, rounded, dtype, "reference")
    for name, tensor in run(method, case, rounded, dtype).items():
        assert tensor.dtype == dtype
        assert_close_to_reference(name, tensor, expected[name], baseline[name], rtol=1e-6)


@pytest.mark.slow_except(
    "bi-clustered-whole_segments", "clustered-plain", "bi-clustered-right_padding", "bi-clustered-sinks_and_holes"
)
@pytest.mark.usefixtures("labels_of_the_reference")
@pytest.mark.parametrize(("method", "case"), CALLS, ids=lambda one: one if isinstance(one, str) else one.name)
def test_values_and_gradients_equal_the_reference(method, case):
    check(method, case, make_inputs(case))


def grouped_inputs(case, seed=0):
    """Queries and keys in a few groups far apart, which any K-means finds, and a few keys far from theirs."""
    query, key, value, mask = make_inputs(case, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for rows, size in ((query, 0.1), (key, 0.1)):
        groups = torch.randn(3, rows.shape[3], generator=generator, dtype=torch.float64)
        rows.mul_(size).add_(groups[torch.arange(case.N) % 3])
    key[:, :, ::9] *= 3.0
    return query, key, value, mask


GROUPS = replace(SMALL, name="groups", N=64, segment_length=16, window=5, H=1, D=16, clusters=3, key_clusters=3)


@pytest.mark.slow_except("torch.bfloat16-bi-clustered")
@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(method, dtype):
    check(method, GROUPS, grouped_inputs(GROUPS), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kib", [163, 227])
def test_block_sizes_of_large_chips(head_dim, dtype, kib, monkeypatch):
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = replace(GROUPS, D=head_dim, Dv=head_dim)
    check("bi-clustered", case, grouped_inputs(case), dtype)


@pytest.mark.slow_except("bi-clustered-torch.float32")
@pytest.mark.parametrize(
    ("method", "dtype"),
    [(method, torch.float32) for method in METHODS] + [("bi-clustered", torch.bfloat16)],
    ids=str,
)
def test_no_output_sees_a_later_token(method, dtype):
    """Bit for bit, with the kernels' own clusters, whatever is changed from a token on."""
    case = replace(SMALL, N=44, H=1)
    inputs = [None if part is None else part.to(DEVICE, dtype) for part in make_inputs(case)]
    with torch.no_grad():
        before = attend(method, case, *inputs, backend="triton")
        for token in (5, 26, 35):
            changed = [part if part is None else part.clone() for part in inputs]
            for part in changed[:3]:
                part[:, :, token:] += 3.0
            after = attend(method, case, *changed, backend="triton")
            assert torch.equal(before[:, :, :token], after[:, :, :token])
            assert (before[:, :, token] != after[:, :, token]).any(dim=-1).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS[1:])
def test_a_padded_batch_is_what_its_texts_are_alone(method):
    case = replace(SMALL, B=2, N=60, masks="left")
    query, key, value, mask = make_inputs(case, torch.float32)
    for tensor in (query, key, value):
        tensor.masked_fill_(~mask[:, None, :, None], torch.nan)
    padded = attend(method, case, *(part.to(DEVICE) for part in (query, key, value, mask)), backend="triton").cpu()
    alone = [part[1:, :, mask[1]].to(DEVICE) for part in (query, key, value)]
    assert_close_to_reference(
        "output",
        padded[1:, :, mask[1]],
        attend(method, case, *alone, None, backend="triton").cpu().double(),
        rtol=1e-6,
    )
    assert (padded[1:, :, ~mask[1]] == 0).all()


@pytest.mark.slow
def test_late_segments_in_parts(monkeypatch):
    case = replace(SMALL, N=64)
    whole, inputs = run("bi-clustered", case, make_inputs(case)), make_inputs(case)
    per_segment = 2 * (5 * 6 * (16 * 4 + 8) + 4 * 8) * 6
    monkeypatch.setattr(distant_keys, "TABLE_BYTES", 2 * per_segment)
    for name, tensor in run("bi-clustered", case, inputs).items():
        assert_close_to_reference(name, tensor, whole[name].double(), rtol=1e-6)


@pytest.mark.parametrize("shift", [0, 30])
def test_bfloat16_queries_find_the_nearest_centroid(shift):
    """What all centroids share must not be rounded with what tells them apart."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 64, generator=generator).repeat(16, 1) + 0.5 * torch.randn(128, 64, generator=generator)
    key = torch.randn(200, 64, generator=generator) * torch.linspace(0, -3, 64).exp()
    metric = (key.T @ key / key.square().mean() / 200 + 0.001 * torch.eye(64))[None].to(DEVICE)
    points = rows.add(shift * torch.randn(64, generator=generator)).to(DEVICE, torch.bfloat16)[None, None]
    members = sort_by_cluster(torch.arange(128, device=DEVICE)[None, None] % 8, None, 8, 16)
    centroids = cluster_means(points, members).bfloat16()
    chosen = torch.empty(1, 1, 128, dtype=torch.int64, device=DEVICE)
    assign(points, Rows(128, 128), known_centroids(centroids, members.starts, metric), chosen)
    offsets = points[0, 0, :, None].double() - centroids.double()
    distances = torch.einsum("ncd,de,nce->nc", offsets, metric[0].double(), offsets)
    assert torch.equal(chosen[0, 0], distances.argmin(dim=1))


def test_what_the_kernels_do_not_take_is_said_or_runs_in_pytorch():
    query, key, value, _ = make_inputs(replace(SMALL, H=33, key_heads=1), torch.float32)
    with pytest.raises(ValueError, match="up to 32 query heads for each of keys, got 33; use backend="):
        attend("clustered", SMALL, query, key, value, None, backend="triton")
    assert torch.equal(
        *(attend("clustered", SMALL, query, key, value, None, backend=form) for form in (None, "batched"))
    )


@triton.jit
def _draw_kernel(
    seed_ptr, factor_ptr, columns, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    o_row, o_column = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BLOCK)
    factor = dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    tl.store(factor_ptr + o_row[:, None] * columns + o_column[None, :], factor, mask=(o_column < columns)[None, :])


@cache
def drawn(seed, rows, columns, dropout_p, kind):
    """The factors of a matrix of weights, as kernels draw them."""
    factor = torch.zeros(rows, columns, device=DEVICE)
    seed = torch.tensor([seed], device=DEVICE)
    _draw_kernel[(rows,)](seed, factor, columns, dropout_p, KINDS=KINDS_OF_WEIGHTS, KIND=kind, BLOCK=128)
    return factor


@pytest.fixture
def drawn_by_kernels(monkeypatch):
    """The reference drops what the kernels drop: of keys one by one by their place, of summaries by their number."""
    chosen = []

    def exact_keys(*arguments):
        found = own_exact_keys(*arguments)
        chosen[:] = found.tolist()
        return found

    class Factors:
        """Of a head's queries of a segment, in the columns of the reference: local keys, exact ones, summaries."""

        def __init__(self, draw, head, own, first):
            settings, (B, H, _, _), n = draw.settings, draw.query.shape, draw.settings.segment_length
            layout, problem = Layout.of(settings._replace(query=draw.query)), draw.first_problem + head
            seed, rows = int(draw.seed), own.stop - own.start
            keys = drawn(seed, B * H * layout.padded, layout.shift + layout.padded, 0.3, CENTROID_WEIGHTS)
            self.keys = keys[problem * layout.padded + own.start :][:rows, layout.shift :]
            sizes = layout.late * B * H * n, layout.late * settings.key_clusters
            late = (own.start // n - layout.first_late) * B * H + problem
            self.summaries = drawn(seed, *sizes, 0.3, TOPK_AND_SUMMARY_WEIGHTS)[max(0, late) * n :][:rows]
            self.local, self.topk, self.like = slice(first, own.stop), settings.topk, draw.query

        def __getitem__(self, index):
            local = self.keys[:, self.local]
            exact = [self.keys[:, place] for place in chosen] + [torch.zeros(len(local))] * (self.topk - len(chosen))
            columns = torch.cat([local, torch.stack(exact, dim=1) if exact else local[:, :0], self.summaries], dim=1)
            return columns[index].to(self.like)

    own_exact_keys = reference.exact_keys
    monkeypatch.setattr(reference, "exact_keys", exact_keys)
    monkeypatch.setattr(reference.Dropout, "__call__", lambda *given: Factors(*given))


@pytest.mark.slow_except("bi-clustered-plain")
@pytest.mark.usefixtures("labels_of_the_reference", "drawn_by_kernels")
@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(
            ("bi-clustered", name)
            for name in ("plain", "grouped_heads", "some_heads_exact", "window_of_many_segments")
        ),
        *((method, "plain") for method in METHODS[:2]),
    ],
)
def test_dropout(method, name):
    case = replace(next(case for case in CASES if case.name == name), dropout_p=0.3)
    expected = run(method, case, make_inputs(case), torch.float64, "reference")
    for part, tensor in run(method, case, make_inputs(case)).items():
        assert_close_to_reference(part, tensor, expected[part], rtol=1e-6)


@pytest.mark.slow
def test_registered_with_torch_library():
    """torch's own check of the schema, the fake function and the autograd formula."""
    for case in (replace(SMALL, N=30, masks="holes"), replace(SMALL, N=20, max_predicted_error=0.1, sinks=True)):
        *tensors, mask = make_inputs(case, torch.float32)
        leaves = [tensor.to(DEVICE).requires_grad_() for tensor in tensors]
        sinks = make_sinks(case, torch.float32)
        given = Settings(
            *leaves, None if mask is None else mask.to(DEVICE), None,
            None if sinks is None else sinks.to(DEVICE).requires_grad_(), "bi-clustered", case.clusters, case.topk,
            case.key_clusters, case.segment_length, case.window, 1, case.fit_queries,
            case.max_predicted_error or torch.inf, 0, 0.3, 0.0, True,
        )  # fmt: skip
        op = torch.ops.hf_effattn.causal_clustered_attention_triton.default
        # The sets of rows in no cluster, and heads that are exact, leave memory as it was.
        torch.library.opcheck(op, given, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.slow
def test_compiles_to_one_op():
    query, key, value, _ = make_inputs(replace(SMALL, N=24), torch.float32)
    sizes = {"clusters": 3, "topk": 3, "key_clusters": 2, "segment_length": 8, "window": 5, "backend": "triton"}
    attend_alone = partial(causal_clustered_attention, **sizes)
    found = []
    for call in (attend_alone, torch.compile(attend_alone, fullgraph=True, backend="aot_eager")):
        leaves = [part.to(DEVICE).detach().requires_grad_() for part in (query, key, value)]
        output = call(*leaves)
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0 if DEVICE == "cpu" else 1e-6)


@pytest.mark.slow_except("triton-clustered", "batched-*")
@each_method
@pytest.mark.parametrize("backend", ["reference", "batched", "triton"])
def test_a_sink_of_minus_infinity_is_none(method, backend):
    inputs = make_inputs(SMALL)
    none = torch.full((SMALL.H,), -torch.inf, device=DEVICE)
    plain, actual = (run(method, SMALL, inputs, backend=backend, sinks=sinks) for sinks in (None, none))
    for name, expected in plain.items():
        torch.testing.assert_close(actual[name], expected, msg=name)


@each_method
def test_the_first_token_sees_itself_alone(method):
    found = run(method, SMALL, make_inputs(replace(SMALL, N=1)))
    torch.testing.assert_close(found["output"].double(), make_inputs(replace(SMALL, N=1))[2], rtol=1e-6, atol=0)
    assert all(found[name].abs().max() < 1e-6 for name in ("query", "key"))


def test_no_rows_at_all():
    for B, N in ((0, 5), (1, 0)):
        leaves = [torch.zeros(B, 2, N, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
        output = attend("bi-clustered", SMALL, *leaves, None, backend="triton")
        assert output.shape == leaves[0].shape
        assert all(grad.shape == leaves[0].shape for grad in torch.autograd.grad(output.sum(), leaves))
