"""The first table of RESULTS.md: each claim of a paper, what came out here, and whether that reproduces it.

A verdict is computed from the kept results by the rule that stands beside its claim. Where the budget was a small part
of the paper's, nothing is judged.
"""

from collections.abc import Callable, Iterator
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd

from hf_effattn.reporting.table import markdown

from ..lra import train as run_lra
from ..reproduce import classification as classification_table
from ..reproduce import lra as lra_table
from ..reproduce import partner_recall
from ..reproduce import translation as translation_table
from ..reproduce.classification_data import DATA_SETS
from . import cst_tables
from .clusterformer_tables import json_of, of_main_budget

SEVEN_SETS = classification_table.DATA_SETS_OF_SWEEP["routings"].split(",")
REPRODUCED, FAILED, UNTESTED = "reproduced", "**not reproduced**", "not tested here"


class Verdict(NamedTuple):
    """A row of the table."""

    claim: str
    outcome: str
    verdict: str


def kept_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of results."""
    result = cst_tables.kept(name)
    if result is None:
        raise FileNotFoundError(f"scripts/results/{name}.json is missing: the verdicts are made from it")
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def frame_of(rows: list[dict[str, Any]]) -> Any:
    """A frame of which no type is checked: its columns hold numbers and words."""
    return pd.DataFrame(rows)


def rows_of(name: str) -> Any:
    """The rows of a file of results as such a frame."""
    return frame_of(kept_rows(name))


def judged(holds: bool) -> str:
    """The word for a claim that was tested."""
    return REPRODUCED if holds else FAILED


def of_ours(holds: bool) -> str:
    """The word for a goal of our own."""
    return "ours, holds" if holds else "**ours, missed**"


def above(differences: list[float]) -> bool:
    """Whether differences of pairs of runs lie above 0, their mean by more than two standard errors of it."""
    return fmean(differences) > 2 * stdev(differences) / len(differences) ** 0.5


def gains_on(dataset: str, name: str, to: str) -> list[float]:
    """Differences of the data set's metric between a row of the routings and another, seed by seed."""
    rows = classification_table.named_rows(kept_rows("classification_table"), "routings")
    rows = of_main_budget([row for row in rows if row["dataset"] == dataset], "epochs", "max_length", "train_samples")
    return classification_table.differences(frame_of(rows), DATA_SETS[dataset].metric, name, to)


def clustered_attention() -> Iterator[Verdict]:
    """Vyas 2020."""
    scores = rows_of("approximation").groupby(["task", "row"])["value"].mean().unstack("row") * 100
    lost = scores.sub(scores["full"], axis=0)
    longer = rows_of("approximation").groupby("task")["longer_share"].max()
    glue = lost[longer >= 0.2].drop(index="squad")  # the others are attended to exactly
    squad = lost.loc["squad"]
    worst = glue["i-clustered-25"].min()
    ours = glue["bi-clustered-25"].dropna()
    yield Verdict(
        "i-clustered-25 keeps GLUE without retraining (within 0.3 points)",
        f"at worst {worst:+.2f} points, on {len(glue)} tasks with texts longer than the clusters",
        judged(worst >= -0.3),
    )
    yield Verdict(
        "bi-clustered-25, ours, keeps GLUE without retraining (within 0.1 points)",
        f"at worst {ours.min():+.2f} points, on {len(ours)} tasks",
        of_ours(ours.min() >= -0.1),
    )
    yield Verdict(
        "i-clustered-25 keeps SQuAD's F1 (the paper: -2.8 points)",
        f"{squad['i-clustered-25']:+.2f} points",
        judged(squad["i-clustered-25"] >= -2.8),
    )
    yield Verdict(
        "clustered-25 fails where single words are read (SQuAD: -89.8 points)",
        f"{squad['clustered-25']:+.2f} points",
        judged(squad["clustered-25"] <= -30),
    )
    yield Verdict(
        "clustered-25 loses much on STS-B (-11.1 points)",
        f"{glue.loc['stsb', 'clustered-25']:+.2f} points, on a smaller model",
        judged(glue.loc["stsb", "clustered-25"] <= -5),
    )
    speed = rows_of("benchmark_attention").query("method == 'i-clustered clusters=100 topk=32' and batch == 1")
    times = speed.set_index("length")["forward_ms"]
    growth = times[16384] / times[4096]
    yield Verdict(
        "time grows linearly with the length",
        f"{growth:.1f}× the time for 4 times the tokens (4,096 to 16,384)",
        judged(growth <= 5),
    )


def composite_slices() -> Iterator[Verdict]:
    """Lee 2023."""
    layers = rows_of("benchmark_cst")
    (faster,) = layers.query("length == 16384 and part == 'attention' and attention == 'slices'")["forward_speedup"]
    yield Verdict(
        "slices are faster on long inputs", f"attention {faster:.0f}× as fast at 16,384 tokens", judged(faster > 1)
    )
    trained = rows_of("cst_training")
    trained = trained[trained["arguments"].notna()]
    first = trained.drop_duplicates(["task", "model"]).set_index(["task", "model"])["perplexity"]
    slices, transformer = (first["WikiText-2, 256 tokens", name] for name in ("CST L=32 α=3", "Transformer"))
    yield Verdict(
        "a language model as good as the Transformer (WikiText-103: 34.2 against 33.2)",
        f"perplexity {slices:.1f} against {transformer:.1f} on WikiText-2, with other positions",
        judged(slices <= 1.05 * transformer),
    )
    accuracy = trained.drop_duplicates(["task", "model"]).set_index(["task", "model"])["test_accuracy"] * 100
    gain = accuracy["20 Newsgroups", "CST L=16 α=1"] - accuracy["20 Newsgroups", "Transformer"]
    yield Verdict(
        "classifies as well as the Transformer", f"{gain:+.1f} points on 20 Newsgroups, one seed", judged(gain >= -0.5)
    )
    longer, shorter = first["Books, 512 tokens", "CST L=64 α=3"], first["Books, 256 tokens", "Transformer"]
    yield Verdict(
        "more context for the same attention lowers perplexity (PG-19: 17.6 against 19.7)",
        f"{longer:.1f} against {shorter:.1f} after 400 steps",
        UNTESTED if longer > shorter else REPRODUCED,
    )
    lra = rows_of("lra_table")
    paper = lra_table.PAPER["CST L=16"]
    steps = ", ".join(f"{task} {steps:,.0f}" for task, steps in lra.groupby("task")["steps"].max().items())
    budgets = [run_lra.DEFAULTS[task].max_steps for task in lra["task"].unique()]
    yield Verdict(
        f"ahead of the Transformer on Long Range Arena (Text: {paper['text']})",
        f"too few steps to tell ({steps}; the paper: {min(budgets):,} to {max(budgets):,})",
        UNTESTED,
    )


def clusterformer() -> Iterator[Verdict]:
    """Wang 2022."""
    transformer, default = classification_table.TRANSFORMER, classification_table.DEFAULT
    for name, claim in (
        ("neural", "the paper's form is above the Transformer on text classification (+0.2 to +2.9)"),
        ("gated", "our gate alone"),
        (default, "our default, gate and centroids: not below the Transformer (beyond two standard errors)"),
    ):
        gains = {dataset: gains_on(dataset, name, transformer) for dataset in SEVEN_SETS}
        means = {dataset: fmean(differences) for dataset, differences in gains.items()}
        worst, best = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        found_text = f"{means[worst]:+.1f} ({worst}) to {means[best]:+.1f} ({best}) on {len(gains)} data sets"
        verdict = "ours"
        if name == "neural":
            verdict = judged(min(means.values()) >= 0)
        elif name == default:
            verdict = of_ours(not any(above([-gain for gain in differences]) for differences in gains.values()))
        yield Verdict(claim, found_text, verdict)
    over_random = {"20 Newsgroups": gains_on("20 Newsgroups", default, classification_table.RANDOM)}
    recalled = rows_of("partner_recall").query("window_blocks == 2")
    for length, part in recalled.groupby("length"):
        scores = part.pivot(index="seed", columns="routing", values="accuracy")
        apart = (scores[partner_recall.DEFAULT] - scores[partner_recall.RANDOM]).dropna()
        if len(apart) > 1:  # of one seed the noise is not known
            over_random[f"partner recall of {length} words"] = apart.tolist()
    yield Verdict(
        "our default is above a random order where the order matters (beyond two standard errors)",
        ", ".join(f"{fmean(gain):+.1f} on {name}" for name, gain in over_random.items()),
        of_ours(all(above(gain) for gain in over_random.values())),
    )
    losses = frame_of(classification_table.named_rows(kept_rows("classification_table"), "losses"))
    wikiqa = losses.query("dataset == 'WikiQA'").groupby("name")["map"].mean()
    gain = wikiqa["neural, L1 and L2"] - wikiqa["neural, no loss"]
    seeds = losses.query("dataset == 'WikiQA'")["name"].value_counts()
    yield Verdict(
        "the losses of the clustering help (WikiQA: +1.9)",
        f"{gain:+.1f}; seeds: {seeds['neural, L1 and L2']} with, {seeds['neural, no loss']} without",
        judged(gain >= 1.9),
    )
    counts = frame_of(classification_table.named_rows(kept_rows("classification_table"), "clusters"))
    by_count = counts[counts["name"].str.startswith("k=")].groupby("name")["accuracy"].mean()
    span = by_count.max() - by_count.min()
    yield Verdict(
        "the number of clusters hardly matters (20 Newsgroups: 1.4 points)", f"{span:.1f} points", judged(span <= 2)
    )
    names = {json_of(settings): name for name, settings in translation_table.MODELS.items()}
    bleu = frame_of([row | {"name": names[json_of(row["settings"])]} for row in kept_rows("translation_table")])
    scores = bleu.pivot_table(index="seed", columns="name", values="bleu")
    change = scores.sub(scores["Transformer"], axis=0).mean()
    yield Verdict(
        "translates better than the Transformer (IWSLT14: +0.5 BLEU)",
        f"{change['neural encoder']:+.1f} BLEU on Multi30k; our gate {change['gated encoder']:+.1f}; same seeds",
        judged(change["neural encoder"] >= 0),
    )
    digits = rows_of("mnist_clustering").query("clusters == 300").groupby("method")["accuracy"].mean()
    neural = next(value for name, value in digits.items() if "neural" in str(name))
    yield Verdict(
        "clusters MNIST better than K-means (93.6)",
        f"{neural:.1f} against {digits['K-means']:.1f}; spherical K-means {digits['spherical K-means']:.1f}",
        judged(neural > digits["K-means"]),
    )
    layer = rows_of("benchmark_clusterformer").query("routing == 'neural' and length == 8192")
    (faster,) = layer["layer_forward_backward_speedup"]
    yield Verdict(
        "trains faster on long texts (4.3× at 7,500 words)",
        f"{faster:.1f}× at 8,192, against SDPA",
        judged(faster >= 4),
    )


PAPERS: dict[str, Callable[[], Iterator[Verdict]]] = {
    "Vyas 2020": clustered_attention,
    "Lee 2023": composite_slices,
    "Wang 2022": clusterformer,
}


def verdicts() -> str:
    """The table."""
    rows = [[paper, *verdict] for paper, verdicts_of in PAPERS.items() for verdict in verdicts_of()]
    return markdown(["paper", "claim", "what came out here", "verdict"], rows, right=())
