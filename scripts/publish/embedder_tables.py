"""Tables of the embedder for long texts: `scripts/reproduce/long_embedder.py`."""

from typing import Any

from hf_effattn.reporting.table import markdown

from ..benchmark.retrieval import CHUNKS, CUT, EXACT
from ..reproduce.long_embedder_data import AFTER, BEFORE, PATCHED
from .cst_tables import Table, kept, of_file

FILE = "long_embedder"
WORDS = {CUT: CUT, CHUNKS: CHUNKS, PATCHED: "whole text, patched", EXACT: "whole text, exact"}


def phase(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a phase."""
    return [row for row in result["rows"] if row["phase"] == name]


@of_file(FILE)
def judged(result: dict[str, Any]) -> Table:
    """How well the vectors of whole meetings retrieve, before and after the training, and what the patched gain."""
    retrieval = kept("retrieval")
    if retrieval is None:
        return "", ""
    before = {(BEFORE, row["method"]): row for row in retrieval["rows"] if "method" in row}
    rows_of = before | {(row["model"], row["vector"]): row for row in phase(result, "retrieval")}
    gains = {(row["model"], row["vector"]): row for row in phase(result, "gains")}
    if not gains:
        return "", ""

    def gain(model: str, vector: str) -> str:
        row = gains.get((model, vector))
        return f"{100 * row['gain']:+.1f} ± {100 * row['standard_error']:.1f}" if row else ""

    rows = []
    for vector, words in WORDS.items():
        found = [f"{100 * rows_of[model, vector]['ndcg_at_10']:.1f}" for model in (BEFORE, AFTER)]
        seconds = f"{rows_of[AFTER, vector]['seconds']:,.0f}"
        rows.append([words, *found, gain(BEFORE, vector), gain(AFTER, vector), seconds])
    whole = rows_of[AFTER, PATCHED]
    note = (
        f"nDCG@10 of {whole['queries']} queries over {whole['meetings']} meetings, which no training saw. Ahead: how "
        "many points the trained model's patched whole texts are above the row, ± the standard error over meetings. "
        "Seconds of the processor for all meetings, after the training. "
    )
    header = ["vector of a meeting", "before", "after", "ahead of it before", "ahead of it after", "seconds"]
    return markdown(header, rows), note


@of_file(FILE)
def steps(result: dict[str, Any]) -> Table:
    """How much faster a patched step is, by the tokens of the text that it learns from."""
    by_attention = {row["attention"]: row["by_length"] for row in phase(result, "steps")}
    if not by_attention:
        return "", ""
    lengths = sorted(by_attention[EXACT], key=int)
    rows = [
        [name, *(f"{by_attention[name][length]['seconds']:.1f} s" for length in lengths)] for name in (EXACT, PATCHED)
    ]
    rows.append(["times faster", *(f"{by_attention[PATCHED][length]['speedup']:.1f}×" for length in lengths)])
    counts = " and ".join(str(by_attention[EXACT][length]["steps"]) for length in lengths)
    note = f"Steps of {result['settings']['max_length']:,} tokens, in turns, medians of {counts}. "
    return markdown(["texts of", *(f"{int(length):,} tokens" for length in lengths)], rows), note


def trained_errors() -> dict[tuple[str, str, int], float]:
    """Errors of the attention after the training, by method, settings and length."""
    rows = phase(kept(FILE) or {"rows": []}, "errors")
    return {(row["method"], row["name"], row["length"]): row["error"] for row in rows if row["model"] == AFTER}
