"""GPU kernels of causal attention over clusters: on a GPU, else under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from support.causal_cases import KERNEL_CASES, METHODS, SMALL, attend, make_inputs
from support.closeness import assert_close_to_reference
from support.kernel_draws import drawn
from support.op_cases import CAUSAL, check_kernels, each, named, to_dtype, with_gradients

from hf_effattn.ops.causal_clustered_attention import reference
from hf_effattn.ops.causal_clustered_attention.triton import clusters, distant_keys
from hf_effattn.ops.causal_clustered_attention.triton.layout import Layout
from hf_effattn.ops.causal_clustered_attention.triton.metric import known_centroids
from hf_effattn.ops.kmeans.reference import cluster_points
from hf_effattn.ops.kmeans.triton import assign
from hf_effattn.ops.kmeans.triton.rows import Rows
from hf_effattn.ops.shared.dropout import CENTROID_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from hf_effattn.ops.shared.triton import chips
from hf_effattn.ops.shared.triton.sort import cluster_means, sort_by_cluster

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = {
    CAUSAL[0]: ["first_token_beyond_the_window"],
    CAUSAL[1]: [],
    CAUSAL[2]: ["whole_segments", "sinks_and_holes"],
}
# The other methods are the same kernels with less in them.
FEW = ("plain", "first_token_beyond_the_window", "grouped_heads")


def cases_of(op):
    return KERNEL_CASES if op is CAUSAL[2] else named(KERNEL_CASES, *FEW)


@pytest.fixture
def labels_of_the_reference(monkeypatch):
    """Both forms have the same clusters; the kernels' own K-means is tested with `kmeans`."""

    def labels(points, mask, metric, count, layout):
        settings = layout.settings
        assigned = torch.zeros(points.shape[:3], dtype=torch.int64)
        if metric is None:
            return assigned.to(points.device)
        metrics = metric.repeat_interleave(points.shape[0] * points.shape[1] // len(metric), dim=0)
        for place, of_metric in zip(torch.cartesian_prod(*map(torch.arange, points.shape[:2])), metrics, strict=True):
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
                assigned[item, head, rows] = cluster_points(*given, of_metric.cpu().double())[0]
        return assigned.to(points.device)

    monkeypatch.setattr(clusters, "kmeans_labels", labels)


@pytest.mark.slow_except("causal clustered-*", "causal bi-clustered-sinks_and_holes")
@pytest.mark.usefixtures("labels_of_the_reference")
@each(CAUSAL, cases_of, lambda op, case: case.name in QUICK[op])
def test_values_and_gradients_equal_the_reference(op, case):
    check_kernels(op, case, op.make(case, torch.float32))


def grouped_inputs(op, case, dtype):
    """Queries and keys in a few groups far apart, which any K-means finds, and a few keys far from theirs."""
    inputs = op.make(case)
    generator = torch.Generator().manual_seed(0)
    for name in ("query", "key"):
        groups = torch.randn(3, case.D, generator=generator, dtype=torch.float64)
        inputs[name].mul_(0.1).add_(groups[torch.arange(case.N) % 3])
    inputs["key"][:, :, ::9] *= 3.0
    return to_dtype(inputs, dtype)


GROUPS = replace(SMALL, name="groups", N=64, segment_length=16, window=5, H=1, D=16, clusters=3, key_clusters=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "kib", "head_dim"),
    [*((op, None, 16) for op in CAUSAL), (CAUSAL[2], 163, 64), (CAUSAL[2], 227, 136)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_and_block_sizes_of_large_chips(op, dtype, kib, head_dim, monkeypatch):
    if kib is not None:
        monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = replace(GROUPS, D=head_dim, Dv=head_dim)
    check_kernels(op, case, grouped_inputs(op, case, dtype))


@pytest.mark.slow_except("bi-clustered-torch.float32")
@pytest.mark.parametrize(
    ("method", "dtype"),
    [(method, torch.float32) for method in METHODS] + [("bi-clustered", torch.bfloat16)],
    ids=str,
)
def test_no_output_sees_a_later_token(method, dtype):
    """Bit for bit, with the kernels' own clusters, whatever is changed from a token on."""
    case = replace(SMALL, N=28, H=1)
    inputs = [None if part is None else part.to(DEVICE, dtype) for part in make_inputs(case)]
    with torch.no_grad():
        before = attend(method, case, *inputs, backend="triton")
        for token in (5, 19):
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
    case, op = replace(SMALL, N=44), CAUSAL[2]
    inputs = op.make(case, torch.float32)
    whole = with_gradients(op, case, inputs, backend="triton")
    per_segment = 2 * (5 * 6 * (16 * 4 + 8) + 4 * 8) * 6
    monkeypatch.setattr(distant_keys, "TABLE_BYTES", 2 * per_segment)
    for name, tensor in with_gradients(op, case, inputs, backend="triton").items():
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
    residuals = points[0, 0, :, None].double() - centroids.double()
    distances = torch.einsum("ncd,de,nce->nc", residuals, metric[0].double(), residuals)
    assert torch.equal(chosen[0, 0], distances.argmin(dim=1))


def test_what_the_kernels_do_not_take_is_said_or_runs_in_pytorch():
    query, key, value, _ = make_inputs(replace(SMALL, H=33, key_heads=1), torch.float32)
    with pytest.raises(ValueError, match="up to 32 query heads for each of keys, got 33; use backend="):
        attend("clustered", SMALL, query, key, value, None, backend="triton")
    assert torch.equal(
        *(attend("clustered", SMALL, query, key, value, None, backend=form) for form in (None, "batched"))
    )


@pytest.fixture
def drawn_by_kernels(monkeypatch):
    """The reference drops what the kernels drop: of keys one by one by their place, of summaries by their number."""
    chosen = []

    def exact_keys(*arguments):
        key_places = own_exact_keys(*arguments)
        chosen[:] = key_places.tolist()
        return key_places

    class Factors:
        """Of a head's queries of a segment, in the columns of the reference: local keys, exact ones, summaries."""

        def __init__(self, draw, head, segment, first):
            settings, (B, H, _, _), n = draw.settings, draw.query.shape, draw.settings.segment_length
            layout, problem = Layout.of(settings._replace(query=draw.query)), draw.first_problem + head
            seed, rows = int(draw.seed), segment.stop - segment.start
            keys = drawn(seed, B * H * layout.padded, layout.shift + layout.padded, 0.3, CENTROID_WEIGHTS)
            self.keys = keys[problem * layout.padded + segment.start :][:rows, layout.shift :]
            sizes = layout.late * B * H * n, layout.late * settings.key_clusters
            late = (segment.start // n - layout.first_late) * B * H + problem
            self.summaries = drawn(seed, *sizes, 0.3, TOPK_AND_SUMMARY_WEIGHTS)[max(0, late) * n :][:rows]
            self.local, self.topk, self.like = slice(first, segment.stop), settings.topk, draw.query

        def __getitem__(self, index):
            local = self.keys[:, self.local]
            exact = [self.keys[:, place] for place in chosen] + [torch.zeros(len(local))] * (self.topk - len(chosen))
            columns = torch.cat([local, torch.stack(exact, dim=1) if exact else local[:, :0], self.summaries], dim=1)
            return columns[index].to(self.like)

    own_exact_keys = reference.exact_keys
    monkeypatch.setattr(reference, "exact_keys", exact_keys)
    monkeypatch.setattr(reference.Dropout, "__call__", lambda *given: Factors(*given))


@pytest.mark.slow
@pytest.mark.usefixtures("labels_of_the_reference", "drawn_by_kernels")
@each(
    CAUSAL,
    lambda op: named(KERNEL_CASES, "grouped_heads", "some_heads_exact"),
)
def test_dropout(op, case):
    case = replace(case, dropout_p=0.3)
    check_kernels(op, case, op.make(case, torch.float32))


@pytest.mark.slow_except("triton-causal clustered", "batched-*")
@pytest.mark.parametrize("op", CAUSAL, ids=str)
@pytest.mark.parametrize("backend", ["reference", "batched", "triton"])
def test_a_sink_of_minus_infinity_is_none(op, backend):
    case = replace(SMALL, N=20, H=1)
    inputs, sinks = op.make(case, torch.float32), {"attention_sinks": torch.tensor([-torch.inf])}
    plain, actual = (with_gradients(op, case, inputs | some, backend=backend) for some in ({}, sinks))
    for name, expected in plain.items():
        torch.testing.assert_close(actual[name], expected, msg=name)


@pytest.mark.parametrize("op", CAUSAL, ids=str)
def test_the_first_token_sees_itself_alone(op):
    case = replace(SMALL, N=1)
    check_kernels(op, case, op.make(case, torch.float32))
