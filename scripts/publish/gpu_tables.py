"""What the kernels gain on a GPU (`scripts/results/gpu/`)."""

from math import inf
from typing import Any

from hf_effattn.reporting.table import markdown

from ..shared.markdown import machine, number
from .cst_tables import NOT_RUN, kept

LENGTHS = (4096, 8192, 16384)
METHODS = (
    "i-clustered clusters=25 topk=32",
    "i-clustered clusters=100 topk=32",
    "bi-clustered clusters=32 topk=32 key_clusters=32",
    "bi-clustered clusters=64 topk=64 key_clusters=32",
    "bi-clustered clusters=128 topk=128 key_clusters=64",
)
CST_LENGTHS = (4096, 16384, 65536)
ROUTINGS = ("neural", "gated")
HEADER = (
    "bfloat16",
    "CUDA graph: forward",
    "and backward",
    "no graph: forward",
    "and backward",
    "the host's share",
    "error",
)
Rows = dict[tuple[str, int], dict[str, Any]]


def kernels() -> str:
    """The verdict, and times faster than exact attention: as a CUDA graph, and without one."""
    attention, cst, former, prefill = (
        kept(f"gpu/benchmark_{name}") for name in ("attention", "cst", "clusterformer_1024", "prefill")
    )
    if not (attention and cst and former and prefill):
        return NOT_RUN
    methods = {(row["method"], row["length"]): row for row in attention["rows"]}
    layers: Rows = {(row["attention"], row["length"]): row for row in cst["rows"] if row.get("part") == "attention"}
    routings: Rows = {
        (row["routing"], row["length"]): {
            name.removeprefix("attention_"): value for name, value in row.items() if name.startswith("attention_")
        }
        for row in former["rows"]
    }
    rows = [
        cells(f"{name}, {length:,}", methods[name, length])
        for name in METHODS
        for length in LENGTHS
        if (name, length) in methods
    ]
    cst_name = f"CST L={cst['settings']['slice_length']} α={cst['settings']['extension_ratio']:g}"
    rows += [cells(f"{cst_name}, {length:,}", layers["slices", length]) for length in CST_LENGTHS]
    rows += [
        cells(f"ClusterFormer, {name}, {length:,}", routings[name, length])
        for name in ROUTINGS
        for length in sorted({length for _, length in routings})
    ]
    verdict = [_verdict(methods, layers), _causal(prefill)]
    note = (
        "Times as fast as the fastest of PyTorch's exact kernels in the same run, clustering included, B=1, "
        f"H={attention['settings']['heads']}, D={attention['settings']['head_dim']}; CST and ClusterFormer with their "
        f"projections, {cst['settings']['width']} wide. The host's share: of the forward time without a graph, what a "
        f"graph saves. Error: relative L2 of the attention output on MiniLM's queries, keys and values, on which "
        "heads run exactly that ask for it; on the random inputs that are timed none does. "
    )
    return "\n\n".join(verdict) + "\n\n" + markdown(list(HEADER), rows) + machine(attention["environment"], note)


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """One line of the table; empty where nothing was measured."""
    passes = ("forward", "forward_backward")
    host = None
    if "forward_graph_ms" in row:
        host = max(0.0, 1 - row["forward_graph_ms"] / row["forward_ms"])
    return [
        name,
        *(number(row, f"{kind}_graph_speedup", ".2f", "×") for kind in passes),
        *(number(row, f"{kind}_speedup", ".2f", "×") for kind in passes),
        "" if host is None else f"{host:.0%}",
        number(row, "real_error", ".2f"),
    ]


def _verdict(methods: Rows, layers: Rows) -> str:
    """Which lengths gain without a graph, why no other does, and what a graph changes."""
    longest = max(LENGTHS)
    few, i_clustered, _, bi_clustered, _ = METHODS

    def ratio(row: dict[str, Any], field: str) -> str:
        return number(row, field, ".1f", "×")

    def takes(kind: str) -> str:  # where a graph saves most of it, the time is the host's
        rows = [row for (name, length), row in methods.items() if name.startswith(kind) and name in METHODS]
        by_host = [r for r in rows if r["length"] in LENGTHS and r.get("forward_graph_ms", inf) < r["forward_ms"] / 2]
        times = [row["forward_ms"] for row in by_host]
        if not times:
            raise ValueError(f"the host no longer takes most of the time of {kind}: the verdict's words must change")
        return f"{min(times):.1f} to {max(times):.1f} ms"

    return (
        f"**Without a CUDA graph only long inputs gain**: at {longest:,} tokens i-clustered attention is "
        f"{ratio(methods[i_clustered, longest], 'forward_speedup')} as fast as exact attention, bi-clustered "
        f"{ratio(methods[bi_clustered, longest], 'forward_speedup')}, since the host takes {takes('i-clustered')} "
        f"(bi-clustered {takes('bi-clustered')}) to start the kernels of a layer. With a CUDA graph it is "
        f"{ratio(methods[i_clustered, longest], 'forward_graph_speedup')} (clusters=25: "
        f"{ratio(methods[few, longest], 'forward_graph_speedup')}), bi-clustered "
        f"{ratio(methods[bi_clustered, longest], 'forward_graph_speedup')}, CST's attention "
        f"{ratio(layers['slices', longest], 'forward_graph_speedup')}, and "
        f"{ratio(layers['slices', max(CST_LENGTHS)], 'forward_graph_speedup')} at {max(CST_LENGTHS):,}."
    )


def _causal(result: dict[str, Any]) -> str:
    """What the form cost before it had kernels."""
    rows = [row for row in result["rows"] if not row["method"].startswith("SDPA") and "speedup" in row]
    slower, lengths = [1 / row["speedup"] for row in rows], [row["length"] for row in rows]
    sizes = result["settings"]
    return (
        "**Decoders run exact attention instead of clustered methods.** The kernels of the causal form have not been "
        "measured on a GPU. Without them it took "
        f"{min(slower):.0f} to {max(slower):.0f} times as long as exact attention, from {min(lengths):,} to "
        f"{max(lengths):,} tokens "
        f"({sizes['heads']} heads, {sizes['key_heads']} of keys, D={sizes['head_dim']})."
    )
