"""The tables of models that mask the future: what a real language model loses, and what its attention gains."""

from typing import Any

from hf_effattn.reporting.table import markdown

from ..benchmark.language_model import CODE
from ..shared.markdown import number
from .cst_tables import Table, of_file


@of_file("language_model")
def language_model(result: dict[str, Any]) -> Table:
    """What every method does to a real language model."""
    names = list(dict.fromkeys(row["text"] for row in result["rows"]))
    kinds = dict.fromkeys(names, "a held-out novel") | {CODE: "Python's own source"}
    texts = ", ".join(f"{text}: {kinds[text]}" for text in names)
    header = ["", "perplexity", "same next token", "scores computed", "time, exact = 1"]
    rows = [
        [
            f"{row['text']}, {row['length']:,}: {row['name']}",
            f"{row['perplexity_change']:+.2%}",
            f"{row['agreement']:.1%}",
            f"{row['scored_share']:.0%}",
            f"{row['seconds'] / row['exact_seconds']:.2f}",
        ]
        for row in sorted(result["rows"], key=lambda row: (row["name"], row["length"], row["text"]))
        if row["name"] != "exact"
    ]
    note = (
        f"{result['settings']['model']}, all layers, no token sees a later one; default settings, or "
        "calibrated: what hf_effattn.calibrate found on other texts of 8,192 tokens, with max_error=0.11 and "
        f"min_length=0. {texts}. Time: of the processor, the whole model. "
    )
    return markdown(header, rows), note


@of_file("ruler")
def ruler(result: dict[str, Any]) -> Table:
    """What calibrated heads keep of the answers that a language model finds in long prompts."""
    prompts = result["settings"]["prompts"]
    scores = {(row["length"], row["task"], row["name"]): row["score"] for row in result["rows"]}
    names = ("exact", "calibrated")
    exact = [
        (length, task) for length, task, name in scores if name == "exact" and (length, task, "calibrated") in scores
    ]
    rows = [
        [f"{length:,} tokens, {task}", *(f"{scores[length, task, name]:.0%}" for name in names)]
        for length, task in exact
    ]
    kept = []
    for length in dict.fromkeys(length for length, _ in exact):
        totals = {name: sum(scores[length, task, name] for at, task in exact if at == length) for name in names}
        if totals["exact"]:
            kept.append(f"{totals['calibrated'] / totals['exact']:.1%} at {length:,}")
    note = (
        f"{result['settings']['model']}: the part of the answers found, of {prompts} prompts a task. Of the mean "
        f"score of exact attention calibrated heads keep {', '.join(kept)}, where one task weighs most: too few to "
        "tell 95% from 100% in any other. Where exact attention finds nothing, nothing is told. "
    )
    return markdown(["", *names], rows), note


@of_file("benchmark_prefill")
def causal_speed(result: dict[str, Any]) -> Table:
    """How much faster the attention of a prompt and of training is, and how far off."""
    header = ["tokens", "forward", "both passes", "scores computed", "error"]
    rows = [
        [
            f"{row['length']:,}: {row['method']}",
            *(number(row, name, ".1f", "×") for name in ("speedup", "training_speedup")),
            number(row, "scored_share", ".0%"),
            number(row, "real_error", ".2f"),
        ]
        for row in result["rows"]
        if row["method"] != row["fastest_exact"]
    ]
    sizes = result["settings"]
    note = (
        f"Times faster than SDPA's causal attention, clustering included: {sizes['heads']} heads of "
        f"{sizes['head_dim']}, random. Calibrated heads: the candidates of SmolLM2's, in the same shares, some exact; "
        "cheapest candidate: what most of these run. Error: of the attention output of the small GPT-2 of "
        "`model_cards/`, the mean of its layers. "
    )
    return markdown(header, rows), note
