"""Put the tables of `scripts/results/` into the pages that show them, between their marks; write the model cards.

python -m scripts.publish.readme
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import pandas as pd

from hf_effattn.patching.model_types.table import (
    NOT_SERVED_HEADER,
    SERVED_HEADER,
    not_served_rows,
    served_rows,
)
from hf_effattn.reporting.table import markdown
from hf_effattn.settings_parsing import method_text

from ..benchmark import documents as benchmark_documents
from ..benchmark import head_errors as benchmark_head_errors
from ..benchmark import images as benchmark_images
from ..benchmark import other_methods as benchmark_other_methods
from ..benchmark import retrieval as benchmark_retrieval
from ..benchmark.attention import EXACT
from ..shared.command_line import run_with_help
from ..shared.markdown import number
from . import (
    budget_tables,
    clusterformer_tables,
    compatibility,
    decoder_tables,
    embedder_tables,
    exact_tables,
    gpu_tables,
    reliability_tables,
)
from . import cards as project_cards
from . import cst_tables as paper_tables
from .cards import CARDS
from .cst_tables import Table, kept, of_file
from .verdicts import verdicts

ROOT = Path(__file__).resolve().parents[2]
PATCHING = ROOT / "hf_effattn" / "patching"


# Of the README, from the fastest to the most exact.
# Of what the benchmark of approximations tries, our two methods, and the errors that its tables ask for.
OURS = {"bi-clustered": "bi-clustered", "i-clustered, K-means": "i-clustered"}
TARGETS = (0.3, 0.2, 0.15, 0.1, 0.075, 0.05, 0.03)
SHOWN = (
    ("i-clustered, K-means", "clusters=100 topk=64"),
    ("bi-clustered", "clusters=32 topk=32 key_clusters=32"),
    ("bi-clustered", "clusters=64 topk=64 key_clusters=32"),
    ("bi-clustered", "clusters=128 topk=128 key_clusters=64"),
)


@of_file("benchmark_other_methods")
def gains(result: dict[str, Any]) -> Table:
    """Times faster than exact attention, and the error, of a few settings at each length."""
    results = [result, *filter(None, [kept("benchmark_other_methods_avx2")])]
    measured = [
        {(row["method"], row["name"], row["length"]): row for row in each["rows"] if not row.get("part")}
        for each in results
    ]
    lengths = sorted({row["length"] for row in result["rows"] if row.get("part") == benchmark_other_methods.TRAINING})

    trained = embedder_tables.trained_errors()

    def cell(*name: Any) -> str:
        """One error for all processors but where rounding gave them other clusters; then that of the trained model."""
        cells = [rows[name] for rows in measured if name in rows]
        errors = [row["error"] for row in cells]
        then = f"→{trained[name]:.2f}" if name in trained else ""
        if max(errors) - min(errors) < 0.015:
            return "/".join(f"{row['speedup']:.1f}×" for row in cells) + f" ({max(errors):.2f}{then})"
        return "/".join(f"{row['speedup']:.1f}× ({row['error']:.2f})" for row in cells) + then

    rows = [
        [f"`{method.split(',')[0]} {settings}`", *(cell(method, settings, length) for length in lengths)]
        for method, settings in SHOWN
    ]
    others = [f"After the slash: {each['environment']['device_name']}; before it: " for each in results[1:]]
    note = (
        "Attention alone, forward, clustering included; the mean of MiniLM's six layers on two novels, its positions "
        f"repeated beyond 512, {result['settings']['dtype']}. {''.join(others)}"
    )
    return markdown(["settings", *(f"{length:,} tokens" for length in lengths)], rows), note


@of_file("benchmark_embeddings")
def closeness(result: dict[str, Any]) -> Table:
    """Cosines of the sentence embeddings, the default clustering beside the others."""
    kinds = list(dict.fromkeys(row["clustering"] for row in result["rows"]))
    cells: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        counts = {name: row[name] for name in ("clusters", "topk", "key_clusters") if row[name]}
        name = f"{row['length']} tokens, {method_text(row['method'], counts)}"
        cells.setdefault(name, {})[row["clustering"]] = f"{row['cosine_mean']:.4f} ({row['cosine_min']:.4f})"
    rows = [[name, *(of_setting[kind] for kind in kinds)] for name, of_setting in cells.items()]
    first = result["rows"][0]
    note = f"{result['settings']['model']}, mean (lowest) of {first['texts']} passages of {first['books']} novels. "
    return markdown(["", *kinds], rows), note


@of_file("head_errors")
def head_errors(result: dict[str, Any]) -> Table:
    """Errors of heads, first order beside order zero, at equal settings."""
    ratios = benchmark_head_errors.summary(result["rows"])
    lengths = sorted(ratios["length"].unique())
    statistics = {"median": "median head", "mean": "mean of heads"}
    header = ["", *(f"{length:,}: {name}" for length in lengths for name in statistics.values())]
    rows = []
    for (clusters, topk, key_clusters), group in ratios.groupby(["clusters", "topk", "key_clusters"]):
        cells = [f"bi-clustered clusters={clusters} topk={topk} key_clusters={key_clusters}"]
        for _, row in group.sort_values("length").iterrows():
            cells += [f"{row[f'first_order {name}']:.3f} ({row[f'order_zero {name}']:.3f})" for name in statistics]
        rows.append(cells)
    note = (
        "Relative L2 error of the attention output; in brackets plain means of key clusters at the same settings. 72 "
        "heads of all-MiniLM-L6-v2, none exact, two novels that no setting was chosen on, positions repeated at 512. "
    )
    return markdown(header, rows), note


@of_file("benchmark_other_methods")
def other_methods(result: dict[str, Any]) -> Table:
    """How much faster than exact attention every approximation is, within an error, at each length."""
    lengths = sorted({row["length"] for row in result["rows"]})
    methods = list(dict.fromkeys(row["method"] for row in result["rows"] if row.get("speedup")))
    best = {
        (length, target): benchmark_other_methods.fastest(result["rows"], length, target)
        for length in lengths
        for target in benchmark_other_methods.TARGETS
    }

    def cell(method: str, length: int, target: float) -> str:
        row = best[length, target].get(method)
        return "-" if row is None else f"{row['speedup']:.1f}×"

    targets = (0.3, 0.2, 0.1, 0.05, 0.03)
    header = ["", *(f"{length:,}: error ≤ {target:g}" for length in lengths for target in targets)]
    rows = [
        [method, *(cell(method, length, target) for length in lengths for target in targets)] for method in methods
    ]
    note = (
        "The fastest of the settings tried of each, mean of the six layers of all-MiniLM-L6-v2 on two novels that no "
        "setting was chosen on, positions repeated beyond 512; -: none reaches the error. The README's table of "
        "settings has other texts, layers and settings, and so other numbers. "
    )
    return markdown(header, rows), note


@of_file("benchmark_clustering")
def clustering(result: dict[str, Any]) -> Table:
    """Time of the labels and error of i-clustered attention with them."""
    lengths = sorted({row["length"] for row in result["rows"]})
    header = ["clustering"] + [f"{length:,}: {what}" for length in lengths for what in ("ms", "error")]
    cells: dict[str, list[str]] = {}
    for row in sorted(result["rows"], key=lambda row: row["length"]):
        cells.setdefault(row["clustering"], []).extend([f"{row['ms']:.0f}", f"{row['attention_error']:.3f}"])
    rows = [[name, *texts] for name, texts in cells.items()]
    settings = result["settings"]
    note = f"clusters={settings['clusters']} topk={settings['topk']}, H=12, D=32, one layer's labels. "
    return markdown(header, rows), note


def fastest(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The fastest of our settings within each error at each length: `length`, `target`, `setting`, `speedup`."""
    tried = pd.DataFrame([row for row in rows if row["method"] in OURS])
    tried["setting"] = tried["method"].map(OURS) + " " + tried["name"]
    best = []
    for target, length in product(TARGETS, sorted(set(tried["length"]))):
        within = tried[(tried["length"] == length) & (tried["error"] <= target)]
        best.append(within.nlargest(1, "speedup")[["length", "setting", "speedup"]].assign(target=target))
    return pd.concat(best)


@of_file("benchmark_other_methods")
def choice(result: dict[str, Any]) -> Table:
    """The fastest settings within an error of the attention output, per length."""
    best = fastest(result["rows"])
    best["cell"] = [f"{row.setting}: {row.speedup:.1f}×" for row in best.itertuples()]
    cells = (
        best.pivot(index="target", columns="length", values="cell").sort_index(ascending=False).fillna("none tried")
    )
    rows = [[f"{target:g}", *row] for target, row in zip(cells.index, cells.to_numpy(), strict=True)]
    note = "Attention alone, mean of all-MiniLM-L6-v2's layers on two novels, positions repeated beyond 512. "
    return markdown(["error at most", *(f"{length:,} tokens" for length in cells)], rows), note


@of_file("benchmark_models")
def whole_models(result: dict[str, Any]) -> Table:
    """Speed of a whole model, as it runs and as it trains."""
    rows = [
        [f"{row['length']:,} tokens, {row['method']}"]
        + [number(row, f"{part}_speedup", ".2f", "×") for part in ("forward", "training")]
        + [f"{row[f'{part}_peak_bytes'] / 2**20:.0f} MiB" for part in ("forward", "training")]
        for row in result["rows"]
    ]
    first = result["rows"][0]
    rounds = result["settings"]["repeats"]
    note = (
        f"A random RoBERTa of {first['shape']} size in {first['dtype']}, one text, medians of {rounds} rounds; "
        "min_length=0 forces the methods where exact attention would run. "
    )
    attention = kept("benchmark_other_methods")
    other = attention and attention["settings"]["dtype"]
    if other and other != first["dtype"]:
        note += f"The README's table of attention alone is in {other}. "
    header = ["", "forward", "training step", "memory", "memory of a step"]
    return markdown(header, rows), note


@of_file("retrieval")
def retrieval(result: dict[str, Any]) -> Table:
    """How well vectors of whole meetings retrieve, and what they cost; against exact attention once that has run."""
    by_method = {row["method"]: row for row in result["rows"] if "method" in row}
    gains = {row["gain_of"]: row for row in result["rows"] if "gain_of" in row}
    exact = by_method.get(benchmark_retrieval.EXACT)
    header = ["vector of a meeting", "nDCG@10", "seconds"]
    if exact:
        header += ["points against exact", "times faster"]
    rows = []
    for name, row in ((name, by_method[name]) for name in benchmark_retrieval.KINDS if name in by_method):
        cells = [name, f"{100 * row['ndcg_at_10']:.1f}", f"{row['seconds']:,.0f}"]
        if row is exact:
            cells += ["", ""]
        elif exact:
            cells.append(f"{100 * gains[name]['gain']:+.1f} ± {100 * gains[name]['standard_error']:.1f}")
            cells.append(f"{exact['seconds'] / row['seconds']:.1f}×")
        rows.append(cells)
    whole = by_method["bi-clustered"]
    note = (
        f"{whole['queries']} queries, {whole['meetings']} meetings of {whole['shortest']:,} to {whole['longest']:,} "
        f"tokens (median {round(whole['median']):,}), QMSum {result['settings']['splits']}; "
        f"{result['settings']['model']}, positions repeated at 512, default settings where none are named. Seconds of "
        "the processor for all meetings. "
    )
    if exact:
        note += "±: standard error over meetings. "
    return markdown(header, rows), note


@of_file("benchmark_images")
def images(result: dict[str, Any]) -> Table:
    """How much faster the image encoders of models that read images among text are, by default settings."""
    encoders: dict[tuple[str, int], dict[str, float]] = {}
    for row in result["rows"]:
        encoders.setdefault((row["encoder"], row["patches"]), {})[row["method"]] = row["forward_speedup"]
    rows = [
        [name, f"{patches:,}", *(f"{speeds[method]:.1f}×" for method in benchmark_images.METHODS)]
        for (name, patches), speeds in encoders.items()
    ]
    note = (
        "Times as fast as SDPA, the whole encoder, forward, float32, default settings, one image; random weights, so "
        "no head runs exactly, and few layers of the published sizes, of Qwen2.5-VL's one of eight with whole images. "
    )
    return markdown(["image encoder", "patches", *benchmark_images.METHODS], rows), note


@of_file("benchmark_documents")
def documents(result: dict[str, Any]) -> Table:
    """What one long document takes an encoder: seconds, the share of attention, memory, exact and patched."""
    cases: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    heads = [row for row in result["rows"] if row["what"] == benchmark_documents.HEADS]
    for row in (row for row in result["rows"] if row not in heads):
        case = cases.setdefault((row["shape"], row["length"], row["dtype"]), {})
        case[row["method"]] = case.get(row["method"], {}) | row
    alone = benchmark_documents.WINDOWS_ALONE
    patched = [*([alone] if any(alone in case for case in cases.values()) else []), *result["settings"]["methods"]]
    rows = []
    for (shape, length, dtype), case in sorted(cases.items()):
        exact, *others = (case.get(name, {}) for name in (EXACT, *patched))
        share = number(exact, "attention_share", ".0%")
        if exact.get("windowed_share"):
            share += f", {exact['windowed_share']:.0%} in layers with windows"
        times = [f"{row['seconds']:.1f} s, {row['speedup']:.1f}×" if "seconds" in row else "" for row in others]
        peaks = [row["peak_bytes"] / 2**20 for row in (exact, others[-1]) if "peak_bytes" in row]
        memory = " and ".join(f"{peak:,.0f}" for peak in peaks) + " MiB" * bool(peaks)
        name = f"{shape}, {length:,} tokens, {dtype}"
        rows.append([name, share, number(exact, "seconds", ".1f", " s"), *times, memory])
    errors = ", ".join(
        f"{row['error']:.3f} at {row['length']:,}" for row in sorted(heads, key=lambda row: row["length"])
    )
    note = (
        "Random weights; attention: its share of the exact model's time. Calibrated: heads have the settings that "
        f'`calibrate(…, error_of="layer")` finds for MiniLM\'s at {benchmark_documents.BUDGET}; on other books it '
        f"errs {errors} tokens, the mean of its layers. Memory: of the exact and the calibrated model, beside weights "
        "and tokens, on one thread. "
    )
    return markdown(["", "attention", "exact", *patched, "memory"], rows), note


@of_file("linear_layers")
def linear_layers(result: dict[str, Any]) -> Table:
    """What int8 linear layers add to a patch: seconds of a whole model, cosines of vectors."""
    methods = [EXACT, *result["settings"]["methods"]]
    cells = {(row["what"], row["length"], row["form"], row["method"]): row for row in result["rows"]}
    rows = []
    for length, form in sorted({(row["length"], row["form"]) for row in result["rows"]}):
        times = [cells.get(("seconds", length, form, method), {}) for method in methods]
        cosines = [cells.get(("vectors", length, form, method), {}) for method in methods]
        seconds = [f"{row['seconds']:.1f} s, {row['speedup']:.1f}×" if row else "" for row in times]
        found = [f"{row['cosine_mean']:.4f}" for row in cosines if row]
        name = form.replace("int8-but-last", "int8, the ends of feed-forward blocks in float32")
        rows.append([f"{length:,} tokens, {name}", *seconds, ", ".join(found)])
    texts, rounds = (max(row.get(field, 0) for row in result["rows"]) for field in ("texts", "rounds"))
    note = (
        "Seconds, and times as fast as exact in float32, of GTE-base's shape with random weights, one text, "
        f"{rounds} round. Cosine: with the vectors of the exact float32 model, the mean of up to {texts} pieces of "
        "held-out books, MiniLM, positions repeated beyond 512; exact, then the methods in their order. "
    )
    return markdown(["", *methods, "cosine"], rows), note


def shortest() -> str:
    """From which length each setting is faster than exact attention, in encoders and where the future is masked."""
    measured = json.loads((PATCHING / "methods" / "crossover.json").read_text(encoding="utf-8"))
    columns = {
        "encoders, CPU": ("", "cpu"),
        "decoders, CPU": ("causal_", "cpu"),
        "encoders, GPU": ("", "cuda"),
    }

    def by_name(prefix: str, device: str) -> dict[str, str]:
        cells = {}
        machines = measured[f"{prefix}measurements"][device].values()
        tried = [row for machine in machines for row in machine["forward_speedup"]]
        for row in measured[f"{prefix}min_length"][device]:
            counts = {name: row[name] for name in ("clusters", "topk", "exact_keys", "key_clusters") if name in row}
            options = {name: value for name, value in row.items() if name != "min_length"}
            speedups = (trial["speedup"] for trial in tried if options | {"speedup": trial["speedup"]} == trial)
            longest = max(int(length) for speedup in speedups for length in speedup)
            shortest = row["min_length"]
            cells[method_text(row["method"], counts)] = (
                f"{shortest:,}" if shortest <= longest else f"over {longest:,}: {shortest:,}"
            )
        return cells

    cells_of = [by_name(*where) for where in columns.values()]
    rows = [[name, *(column.get(name, "") for column in cells_of)] for name in dict.fromkeys(chain(*cells_of))]
    machines = {
        name: list(measured[f"{prefix}measurements"][device].values()) for name, (prefix, device) in columns.items()
    }
    shape = machines["encoders, CPU"][0]
    inputs = f"Random inputs, B={shape['batch']}, H={shape['heads']}, D={shape['head_dim']}; the longest of "
    measured_on = [f"{name}: {' and '.join(map(_machine, names))}" for name, names in machines.items()]
    return markdown(["", *columns], rows) + f"\n\n<sub>{inputs}{'; '.join(measured_on)}</sub>"


def _machine(measured: dict[str, Any]) -> str:
    where = measured["environment"]
    day, torch = where["time"].split("T")[0], where["versions"]["torch"]
    return f"{where['device_name']}, {measured['dtype']}, {where['threads']} threads, torch {torch}, {day}"


def served() -> str:
    """The model types that can be patched."""
    return markdown(SERVED_HEADER, [(f"`{name}`", *cells) for name, *cells in served_rows()], right=())


def not_served() -> str:
    """The model types that are asked for and cannot be patched."""
    rows = [(", ".join(f"`{name}`" for name in names.split(", ")), reason) for names, reason in not_served_rows()]
    return markdown(NOT_SERVED_HEADER, rows, right=())


# Which tables each text has.
TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"gains": gains},
    PATCHING / "MODEL_TYPES.md": {"served model types": served, "model types not served": not_served},
    PATCHING / "MEASUREMENTS.md": {
        "closeness": closeness,
        "choice": choice,
        "whole models": whole_models,
        "shortest": shortest,
        "head errors": head_errors,
        "budgets": budget_tables.budgets,
        "budgets of a decoder": budget_tables.budgets_of_a_decoder,
        "layers": budget_tables.layers,
        "other methods": other_methods,
        "clustering": clustering,
        "language model": decoder_tables.language_model,
        "causal speed": decoder_tables.causal_speed,
        "ruler": decoder_tables.ruler,
        "windows": exact_tables.windows,
        "sinks": exact_tables.sinks,
        "longformer": exact_tables.longformer,
        "relative bias": exact_tables.relative_bias,
        "pixtral": exact_tables.pixtral,
        "images": images,
        "int8": linear_layers,
        "one text": reliability_tables.one_text,
    },
    PATCHING / "COMPATIBILITY.md": {"compatibility": compatibility.table},
    ROOT / "hf_effattn" / "ops" / "README.md": {"kernels": gpu_tables.kernels},
    CARDS / "LONG_DOCUMENTS.md": {"whole models": whole_models, "one document": documents},
    CARDS / "RELIABILITY.md": {
        "verdicts": reliability_tables.verdicts,
        "versions": reliability_tables.versions,
    },
    CARDS / "RESULTS.md": {
        "verdicts": verdicts,
        "layers": paper_tables.layers,
        "language models": paper_tables.language_models,
        "classifiers": paper_tables.classifiers,
        "converted": paper_tables.converted,
        "before": paper_tables.before_fine_tuning,
        "approximation": paper_tables.approximation,
        "retrieval": retrieval,
        "embedder": embedder_tables.judged,
        "embedder steps": embedder_tables.steps,
        "clusterformer layers": clusterformer_tables.layers,
        "partner recall": clusterformer_tables.partner_recall,
        "mnist": clusterformer_tables.clusterings,
        "routings": clusterformer_tables.routings,
        "clusters": clusterformer_tables.clusters,
        "translation": clusterformer_tables.translation,
    },
}


def with_tables(path: Path) -> str:
    """The text at `path` with every table made anew."""
    text = path.read_text(encoding="utf-8")
    for name, make in TABLES[path].items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        if text.count(start) != 1:
            raise ValueError(f"{path.name} has {text.count(start)} places for the table {name!r}; it needs one")
        before, rest = text.split(start)
        _, after = rest.split(end, 1)
        text = f"{before}{start}{make()}\n{end}{after}"
    return text


# What makes each text that is made of results.
TEXTS: dict[Path, Callable[[], str]] = {path: partial(with_tables, path) for path in TABLES}
TEXTS |= {CARDS / name / "README.md": partial(project_cards.text_of, name) for name in project_cards.MADE}


def main() -> None:
    """Write every text."""
    for path, make in TEXTS.items():
        path.write_text(make(), encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
