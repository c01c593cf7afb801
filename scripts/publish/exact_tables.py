"""Tables of what a patch makes faster without approximating: windows, biases of distances, several images, sinks."""

from typing import Any

from hf_effattn.reporting.table import markdown

from ..benchmark.attention import EXACT
from ..benchmark.exact_models import BLOCKS
from ..shared.markdown import number
from .cst_tables import Table, of_file


@of_file("benchmark_windows")
def windows(result: dict[str, Any]) -> Table:
    """How much faster layers with a window are in blocks, and how far off."""
    cases: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        case = cases.setdefault(tuple(row[name] for name in ("before", "after", "sharing", "length", "batch")), {})
        case[row["dtype"]] = row
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    columns = "forward", "both passes", "error"
    header = ["window", "tokens", *(f"{dtype}: {column}" for dtype in dtypes for column in columns)]
    rows = []
    for case_of, case in sorted(cases.items(), key=lambda item: (not item[0][1], item[0])):
        before, after, sharing, length, batch = case_of
        texts = f"{batch} × {length:,}" if batch > 1 else f"{length:,}"
        shared = f", {sharing} heads share keys" if sharing > 1 else ""
        cells = [(f"{after} to each side" if after else f"{before + 1:,} backwards") + shared, texts]
        for dtype in dtypes:
            speeds = (f"{case[dtype][f'{name}_speedup']:.1f}×" for name in ("forward", "training"))
            cells += [*speeds, f"{case[dtype]['error']:.0e}"]
        rows.append(cells)
    sizes = result["settings"]
    note = (
        "Times faster than SDPA with transformers' dense mask, masks included, and the relative L2 distance of the "
        f"outputs; one layer of {sizes['heads']} heads of {sizes['head_dim']}, random inputs. "
    )
    return markdown(header, rows), note


# Measured and not served: `NOT_SERVED` says why.
DROPPED = {"DeBERTa-base": "DeBERTa-base (dropped: gains too little)"}


def _beside_own_code(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: how much faster models are than by transformers' own code, what they hold, and how far off."""
    cases: dict[tuple[str, int, int], dict[str, dict[str, dict[str, Any]]]] = {}
    for row in result["rows"]:
        case = cases.setdefault((row["model"], row["texts"], row["length"]), {})
        case.setdefault(row["dtype"], {})[row["method"]] = row
    dtypes = list(dict.fromkeys(row["dtype"] for row in result["rows"]))
    columns = "forward", "training", "error"
    held = {"memory": "forward_peak_bytes", "memory, training": "training_peak_bytes"}
    header = ["model", "tokens", *(f"{dtype}: {column}" for dtype in dtypes for column in columns), *held]
    rows = []
    order = list(dict.fromkeys(name for name, *_ in cases))
    for (name, texts, length), case in sorted(
        cases.items(), key=lambda at: (order.index(at[0][0]), at[0][2], at[0][1])
    ):
        cells = [DROPPED.get(name, name), f"{texts} × {length:,}" if texts > 1 else f"{length:,}"]
        for patched in (case[dtype][BLOCKS] for dtype in dtypes):
            speeds = (number(patched, f"{name}_speedup", ".1f", "×") for name in ("forward", "training"))
            cells += [*speeds, f"{patched['error']:.0e}"]
        ways = case[dtypes[0]][EXACT], case[dtypes[0]][BLOCKS]
        peaks = [[row[peak] / 2**20 for row in ways if peak in row] for peak in held.values()]
        cells += [" to ".join(f"{peak:,.0f}" for peak in both) + " MiB" if both else "" for both in peaks]
        rows.append(cells)
    return header, rows


@of_file("benchmark_longformer")
def longformer(result: dict[str, Any]) -> Table:
    """Longformer and its kind in blocks, and Gemma 2."""
    counts = {row["model"]: row["layers"] for row in result["rows"]}
    layers = ", ".join(f"{count} of {name}'s" for name, count in counts.items())
    note = (
        "Times as fast as transformers' own code, all layers, the first token of Longformer and LED seeing all "
        "others, and the relative L2 distance of the last hidden states; memory beside the weights, "
        f"{result['rows'][0]['dtype']}. Published sizes, {layers} layers, random weights, one text. Most of "
        "LED's memory is a mask of N × N, of LongT5's the biases. "
    )
    return markdown(*_beside_own_code(result)), note


@of_file("benchmark_relative_bias")
def relative_bias(result: dict[str, Any]) -> Table:
    """T5, MPNet, DeBERTa, Parakeet and Wav2Vec2-BERT without matrices of distances."""
    note = (
        "Times as fast as transformers' own code, the whole encoder, training with its dropout, and the relative L2 "
        "distance of the last hidden states; memory beside the weights, "
        f"{result['rows'][0]['dtype']}. Published sizes, {result['rows'][0]['layers']} layers, random weights; of "
        "several texts the shortest is half as long; Parakeet, of frames of 80 ms, without the convolutions before; "
        "w2v-bert-2.0, of 20 ms. "
    )
    return markdown(*_beside_own_code(result)), note


@of_file("benchmark_pixtral")
def pixtral(result: dict[str, Any]) -> Table:
    """Several images seen by Pixtral, each by itself."""
    header, rows = _beside_own_code(result)
    note = (
        "Times as fast as transformers' own code, the whole encoder, training without updates, and the relative L2 "
        f"distance of the last hidden states; memory beside the weights, {result['rows'][0]['dtype']}. Published "
        f"size, {result['rows'][0]['layers']} layers, random weights, square images of one size. "
    )
    return markdown(["model", "images × patches", *header[2:]], rows), note


@of_file("benchmark_sinks")
def sinks(result: dict[str, Any]) -> Table:
    """How much faster layers with attention sinks are than transformers' eager ones, and what they hold."""
    kinds = {"full": "all earlier tokens", "window": f"windows of {result['settings']['window']}"}
    names = {"eager": "transformers, eager", "exact": "patched, exact"}
    header = ["layers that see", "tokens", "", "speed", "ms", "memory", "error"]
    rows = [
        [
            kinds[row["layer"]],
            f"{row['length']:,}",
            names.get(row["way"], row["way"]),
            "" if row["speedup"] is None else f"{row['speedup']:.1f}×",
            f"{row['ms']:,.0f}",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            f"{row['error']:.0e}" if row.get("error") is not None else "",
        ]
        for row in result["rows"]
    ]
    sizes = result["settings"]
    note = (
        f"{sizes['heads']} query heads on {sizes['key_heads']} of keys, {sizes['head_dim']} wide, as gpt-oss has, "
        f"random inputs, {result['rows'][0]['dtype']}, masks included. Error: relative L2 distance from eager "
        "attention, both rounded. No row: eager scores would not fit. "
    )
    return markdown(header, rows, right=range(3, 7)), note
