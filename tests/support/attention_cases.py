"""Inputs that the tests of the attention ops share: sizes, masks and a definition written as loops."""

from dataclasses import dataclass, replace
from math import exp

import torch

from hf_effattn import ops


@dataclass(frozen=True)
class Case:
    """Sizes of one test; `key_heads=None` means as many heads of keys and values as of queries."""

    name: str
    B: int = 2
    H: int = 2
    key_heads: int | None = None
    N: int = 37
    M: int = 37
    D: int = 16
    Dv: int = 16
    clusters: int = 5
    key_clusters: int = 4
    topk: int = 6
    masks: str = "none"
    separated: bool = False  # every cluster has keys so far ahead of the rest that every dtype chooses them


CASES = (
    Case("plain"),
    Case("one_token", N=1, M=1),
    Case("one_query", N=1),
    Case("one_key", M=1),
    Case("prime_lengths", N=53, M=101),
    Case("fewer_queries_than_clusters", N=3, clusters=7),
    Case("one_cluster", clusters=1),
    Case("empty_clusters", N=9, clusters=32),
    Case("one_key_cluster", key_clusters=1),
    Case("fewer_keys_than_key_clusters", M=3, key_clusters=11),
    Case("topk_beyond_keys", topk=50),
    Case("odd_dimensions", D=20, Dv=12, N=41, M=23),
    Case("long", N=211, M=150, clusters=9, topk=17),
    Case("right_padding", masks="right"),
    Case("left_padding", masks="left"),
    Case("holes", masks="holes", N=61, M=47),
    Case("row_fully_padded", masks="row"),
    Case("fewer_keys_than_topk", masks="few", topk=9),
    Case("grouped_heads", H=6, key_heads=2),
    Case("one_key_head_and_holes", H=3, key_heads=1, N=29, masks="holes"),
)


KERNEL_CASES = (
    Case("plain", B=1, N=37, M=37),
    Case("prime_lengths", B=1, H=1, N=83, M=101, clusters=3, topk=40),  # more top keys than a tile holds
    Case("fewer_queries_than_clusters", B=1, H=1, N=3, clusters=7),
    Case("topk_beyond_keys", B=1, H=1, clusters=2, topk=50),
    Case("odd_dimensions", B=1, D=20, Dv=40, N=41, M=23, clusters=3),
    Case("holes", H=1, masks="holes", N=61, M=47, clusters=3),
    Case("row_fully_padded", H=1, masks="row", clusters=2),
    Case("fewer_keys_than_topk", H=1, masks="few", clusters=2, topk=9),
    Case("one_key_head_and_holes", H=3, key_heads=1, N=29, clusters=2, masks="holes"),
)
SMALL = Case("small", B=1, H=2, key_heads=1, N=21, M=19, D=8, Dv=8, clusters=2, topk=4)


@dataclass
class Inputs:
    """Tensors of a case."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    labels: torch.Tensor
    key_labels: torch.Tensor
    key_mask: torch.Tensor | None
    query_mask: torch.Tensor | None

    def to(self, dtype: torch.dtype) -> "Inputs":
        query, key, value = (tensor.detach().to(dtype) for tensor in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def to_device(self, device: str) -> "Inputs":
        return Inputs(**{name: None if tensor is None else tensor.to(device) for name, tensor in vars(self).items()})


def padding(kind: str, B: int, length: int) -> torch.Tensor | None:
    """Boolean mask `(B, length)` of the asked kind; the first item is never masked but with holes."""
    if kind == "none":
        return None
    mask = torch.ones(B, length, dtype=torch.bool)
    if kind == "right":
        mask[-1, length // 2 :] = False
    elif kind == "left":
        mask[-1, : length // 3] = False
    elif kind == "holes":
        mask = torch.rand(B, length, generator=torch.Generator().manual_seed(length)) > 0.4
    elif kind == "row":
        mask[-1] = False
    elif kind == "few":
        mask[-1, 4:] = False
    return mask


def make_inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Query, key and value as transformers hands them over: `(B, N, H, D)` in memory, seen as `(B, H, N, D)`."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(case.B, length, heads, dim, dtype=torch.float64, generator=generator).transpose(1, 2)
        for length, heads, dim in (
            (case.N, case.H, case.D),
            (case.M, case.key_heads or case.H, case.D),
            (case.M, case.key_heads or case.H, case.Dv),
        )
    )
    if case.separated:
        key[:, :, : case.topk] *= 4.0
        query = key[:, :, : case.topk].mean(dim=2, keepdim=True) + 0.1 * query
    query, key, value = (rows.to(dtype) for rows in (query, key, value))
    labels = torch.randint(case.clusters, (case.B, case.H, case.N), generator=generator)
    key_labels = torch.randint(case.key_clusters, key.shape[:3], generator=generator)
    masks = (padding(case.masks, case.B, length) for length in (case.M, case.N))
    return Inputs(query, key, value, labels, key_labels, *masks)


def attend(op: str, case: Case, inputs: Inputs, **options: object) -> torch.Tensor:
    """Run the op named `op` on a case."""
    settings = {"clusters": case.clusters, "key_mask": inputs.key_mask, "query_mask": inputs.query_mask, **options}
    tensors = [inputs.query, inputs.key, inputs.value, inputs.labels]
    if op != "clustered_attention":
        settings.setdefault("topk", case.topk)
    if op == "bi_clustered_attention":
        tensors.append(inputs.key_labels)
        settings.setdefault("key_clusters", case.key_clusters)
    return getattr(ops, op)(*tensors, **settings)


def dot(a: list, b: list) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def mean(rows: list) -> list:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def attend_with_loops(
    query: list, key: list, value: list, labels: list, clusters: int, topk: int, key_mask: list, query_mask: list
) -> list:
    """Spec of one head in plain Python: lists of rows in, list of rows out. `topk=0` is clustered attention."""
    N, M, D, Dv = len(query), len(key), len(query[0]), len(value[0])
    output = [[0.0] * Dv for _ in range(N)]
    seen = [t for t in range(M) if key_mask[t]]
    for j in range(clusters):
        members = [i for i in range(N) if labels[i] == j and query_mask[i]]
        if not members or not seen:
            continue
        centroid = mean([query[i] for i in members])
        raw = {t: exp(dot(centroid, key[t]) * D**-0.5) for t in seen}
        attention = {t: raw[t] / sum(raw.values()) for t in seen}
        top = sorted(seen, key=lambda t: -attention[t])[:topk]
        mass = sum(attention[t] for t in top)
        for i in members:
            weights = dict(attention)
            exact = {t: exp(dot(query[i], key[t]) * D**-0.5) for t in top}
            for t in top:
                weights[t] = mass * exact[t] / sum(exact.values())
            assert abs(sum(weights.values()) - 1) < 1e-12
            output[i] = [sum(weights[t] * value[t][d] for t in seen) for d in range(Dv)]
    return output


def squared_distance(row: list, residuals: list) -> float:
    """`row^T Σ_η row` for the covariance of the residuals."""
    return sum(dot(row, eta) ** 2 for eta in residuals) / len(residuals)


def difference(a: list, b: list) -> list:
    return [x - y for x, y in zip(a, b, strict=True)]


def residuals_with_loops(heads: list, clusters: int, query_mask: list) -> list:
    """Scaled queries that count less the mean of their cluster, of several heads `(queries, labels)`."""
    residuals = []
    for query, labels in heads:
        scale = len(query[0]) ** -0.5
        for j in range(clusters):
            members = [
                [scale * x for x in row]
                for row, label, m in zip(query, labels, query_mask, strict=True)
                if m and label == j
            ]
            residuals += [difference(row, mean(members)) for row in members]
    return residuals


def attend_to_key_clusters_with_loops(
    query: list,
    key: list,
    value: list,
    labels: list,
    key_labels: list,
    residuals: list,
    clusters: int,
    key_clusters: int,
    topk: int,
    key_mask: list,
    query_mask: list,
) -> list:
    """Spec of one head of bi-clustered attention in plain Python: lists of rows in, list of rows out.

    `residuals` are those of all the query heads that share the keys: what tells which keys a cluster represents badly.
    """
    N, M, D, Dv = len(query), len(key), len(query[0]), len(value[0])
    scaled = [[x * D**-0.5 for x in row] for row in query]
    output = [[0.0] * Dv for _ in range(N)]
    inside = {c: [t for t in range(M) if key_mask[t] and key_labels[t] == c] for c in range(key_clusters)}
    inside = {c: keys for c, keys in inside.items() if keys}
    mean_key = {c: mean([key[t] for t in keys]) for c, keys in inside.items()}
    mean_value = {c: mean([value[t] for t in keys]) for c, keys in inside.items()}
    distance = {t: difference(key[t], mean_key[c]) for c, keys in inside.items() for t in keys}
    badly = {t: max(squared_distance(row, residuals), 1e-30) for t, row in distance.items()}
    for j in range(clusters):
        members = [i for i in range(N) if labels[i] == j and query_mask[i]]
        if not members or not inside:
            continue
        centroid = mean([scaled[i] for i in members])
        mass_of = {t: exp(dot(centroid, key[t])) for t in badly}  # w_jt
        exact = sorted(badly, key=lambda t: -mass_of[t] * badly[t])[:topk]  # T_j
        mass_of |= {t: m * exp(min(badly[t] / 2, 0.5)) for t, m in mass_of.items() if t not in exact}  # lifted
        rest = {c: [t for t in keys if t not in exact] for c, keys in inside.items()}
        rest = {c: keys for c, keys in rest.items() if keys}
        mass = {c: sum(mass_of[t] for t in keys) for c, keys in rest.items()}  # S_jc
        tilted_key, tilted_value = (
            {c: [sum(mass_of[t] * rows[t][d] for t in keys) / mass[c] for d in range(len(rows[0]))]
             for c, keys in rest.items()}
            for rows in (key, value)
        )  # fmt: skip
        at_centroid = sum(mass_of[t] for t in exact) + sum(mass.values())
        dipole = [[0.0] * Dv for _ in range(D)]  # M_j
        for c in rest:
            for t in inside[c]:
                share = mass[c] / at_centroid / len(inside[c])
                of_value = difference(value[t], mean_value[c])
                for d, of_key in enumerate(distance[t]):
                    dipole[d] = [m + share * of_key * v for m, v in zip(dipole[d], of_value, strict=True)]
        for i in members:
            eta = difference(scaled[i], centroid)
            of_exact = {t: exp(dot(scaled[i], key[t])) for t in exact}
            of_cluster = {c: mass[c] * exp(dot(eta, tilted_key[c])) for c in rest}
            total = sum(of_exact.values()) + sum(of_cluster.values())
            share_of_clusters = sum(of_cluster.values()) / total
            share_at_centroid = sum(mass.values()) / at_centroid
            ratio = share_of_clusters / share_at_centroid if rest else 0.0  # r_i
            for d in range(Dv):
                output[i][d] = (
                    sum(weight * value[t][d] for t, weight in of_exact.items()) / total
                    + sum(weight * tilted_value[c][d] for c, weight in of_cluster.items()) / total
                    + ratio * sum(eta[e] * dipole[e][d] for e in range(D))
                )
    return output
