"""Tables of ClusterFormer's results with the paper's numbers beside them, as Markdown.

Source of the numbers: Wang 2022.
"""

from collections import Counter
from typing import Any

import pandas as pd

from hf_effattn.reporting.table import markdown

from ..benchmark import clusterformer as benchmark_clusterformer
from ..reproduce import classification as classification_table
from ..reproduce import digits as mnist_clustering
from ..reproduce import translation as translation_table
from ..reproduce.classification_data import DATA_SETS
from ..reproduce.partner_recall import LOSSES, VALUES
from ..reproduce.partner_recall import table as recall_table
from ..shared.markdown import by_length, of_frame
from ..shared.runs import mean_and_deviation
from .cst_tables import Table, of_file


def of_main_budget(rows: list[dict[str, Any]], *fields: str) -> list[dict[str, Any]]:
    """The rows whose `fields` are those that most have: runs of other budgets are not compared with them."""
    budgets = [tuple(row[field] for field in fields) for row in rows]
    ((main, _),) = Counter(budgets).most_common(1)
    return [row for row, budget in zip(rows, budgets, strict=True) if budget == main]


@of_file("partner_recall")
def partner_recall(result: dict[str, Any]) -> Table:
    """Accuracy of every routing by the number of words and of blocks in sight."""
    shown = recall_table(result["rows"])
    shown = shown.set_axis([f"{column[0]} words, {column[1]} blocks" for column in shown.columns], axis=1)
    sizes = result["settings"]
    note = (
        f"Accuracy in percent, {100 / VALUES} by chance. 2 layers, {sizes['hidden_size']} wide, √N clusters, "
        f"{sizes['steps']:,} steps of {sizes['words']:,} words, learning rate {sizes['learning_rate']}, "
        f"{sizes['dtype']}; the deviation is over seeds. Losses: weights of "
        f"{' and '.join(map(str, LOSSES.values()))} for L1 and L2. Full attention has no blocks. "
    )
    return of_frame(shown), note


@of_file("mnist_clustering")
def clusterings(result: dict[str, Any]) -> Table:
    """Neural clustering alone beside other clusterings, on digits."""
    shown = mnist_clustering.table(result["rows"])
    shown.columns = [f"{clusters} clusters" for clusters in shown.columns]
    note = "Accuracy on the test images in percent, every cluster the class of most of its training images. "
    return of_frame(shown), note


def with_difference(rows: pd.DataFrame, metric: str, name: str) -> str:
    """Mean and deviation of the metric, and its difference to the Transformer with the same seeds."""
    scores = mean_and_deviation(rows.loc[rows["name"] == name, metric])
    gains = classification_table.differences(rows, metric, name, classification_table.TRANSFORMER)
    return f"{scores} ({sum(gains) / len(gains):+.1f})" if gains else scores


def of_sweep(result: dict[str, Any], sweep: str) -> Table:
    """What a sweep measured, a column per data set."""
    named_rows = classification_table.named_rows
    rows = named_rows(result["rows"], sweep)
    if not rows:
        return "", ""
    frame = pd.DataFrame(rows)
    names = list(dict.fromkeys(frame["name"]))
    columns: dict[str, dict[Any, str]] = {}
    budgets = []
    for dataset in (name for name in DATA_SETS if name in set(frame["dataset"])):
        of_dataset = [row for row in rows if row["dataset"] == dataset]
        part = pd.DataFrame(of_main_budget(of_dataset, "epochs", "max_length", "train_samples"))
        columns[dataset] = {
            name: with_difference(part, DATA_SETS[dataset].metric, name) for name in dict.fromkeys(part["name"])
        }
        length = part.iloc[0]["max_length"]
        costs = {row["name"]: row for row in named_rows(result["rows"], sweep, "step") if row["max_length"] == length}
        if sweep == "clusters" and costs:
            columns["speed of a step"] = {name: f"{row['speedup']:.2f}×" for name, row in costs.items()}
            columns["MiB of a step"] = {name: f"{row['step_peak_bytes'] / 2**20:.0f}" for name, row in costs.items()}
        first = part.iloc[0]
        texts = "" if pd.isna(first["train_samples"]) else f" on {first['train_samples']:,.0f} texts"
        budgets.append(f"{dataset}: {first['epochs']} epochs{texts}, {first['max_length']} tokens")
    shown = pd.DataFrame(columns).reindex(names).fillna("")
    note = (
        "Accuracy in percent (WikiQA: mean average precision), deviation over seeds, in brackets the difference to "
        f"the Transformer with the same seeds. {'. '.join(budgets)}. {result['settings']['dtype']}. "
    )
    if "speed of a step" in columns:
        note += "Speed and memory: a training step on a full batch of the longest texts, interleaved. "
    return of_frame(shown), note


@of_file("classification_table")
def routings(result: dict[str, Any]) -> Table:
    """Classification from scratch by what sorts the words."""
    return of_sweep(result, "routings")


@of_file("classification_table")
def clusters(result: dict[str, Any]) -> Table:
    """The number of clusters on long texts."""
    return of_sweep(result, "clusters")


@of_file("translation_table")
def translation(result: dict[str, Any]) -> Table:
    """BLEU on Multi30k."""
    names = {json_of(settings): name for name, settings in translation_table.MODELS.items()}
    rows = [row | {"name": names[json_of(row["settings"])]} for row in result["rows"]]
    rows = of_main_budget(rows, "epochs", "max_steps", "test_samples")
    sizes = result["settings"]["sizes"]
    note = (
        f"German to English, test_2016_flickr, {sizes['num_hidden_layers']} + {sizes['num_hidden_layers']} layers, "
        f"{sizes['hidden_size']} wide, {sizes['clusters']} clusters, {rows[0]['epochs']} epochs, "
        f"{result['settings']['dtype']}; the deviation is over seeds. "
    )
    return of_frame(translation_table.table(rows)[["BLEU", "BLEU - Transformer"]]), note


def json_of(settings: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings as something that can be looked up."""
    return tuple(sorted(settings.items()))


@of_file("benchmark_clusterformer")
def layers(result: dict[str, Any]) -> Table:
    """Speed and memory of a layer by the number of words, for every routing."""
    first = result["rows"][0]
    shown = [
        row | {"mib": row["layer_forward_backward_peak_bytes"] / 2**20}
        for row in result["rows"]
        if (row["dtype"], row["batch"]) == (first["dtype"], first["batch"])
    ]
    passes = ("inference", "forward"), ("training step", "forward_backward")
    rivals = [row for row in shown if row["routing"] != benchmark_clusterformer.EXACT]
    header, rows = by_length(
        rivals,
        "routing",
        [(f", {passing}", f"layer_{field}_speedup", ".1f", "×") for passing, field in passes],
    )
    rows += by_length(shown, "routing", [(": MiB of a training step", "mib", ".0f", "")])[1]
    sizes, factor = result["settings"]["sizes"], result["settings"]["factor"]
    note = (
        f"Against the same layer with SDPA, interleaved; {sizes['hidden_size']} wide, {sizes['num_attention_heads']} "
        f"heads, √({factor:g}·N) clusters, {first['dtype']}, {first['batch']} text, with the sorting. "
    )
    return markdown(header, rows), note
