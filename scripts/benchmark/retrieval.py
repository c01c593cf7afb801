"""Do vectors of whole meetings find the meeting that a query is about? QMSum, nDCG@10, exact and approximate.

The model is all-MiniLM-L6-v2; its positions, 512 as trained, are repeated. Documents are QMSum's transcripts, queries
its specific ones: the general ones ask the same of every meeting ("Summarize the whole meeting."). A query that is
asked of several meetings is about each of them.

    python -m scripts.benchmark.retrieval                 # writes scripts/results/retrieval.json; an hour on a core
    python -m scripts.benchmark.retrieval --splits test   # half the meetings, into another --output

Every vector is kept in `.cache/retrieval`: a stopped run goes on at the next meeting, and what the output file holds
is not measured again. Seconds are the processor's, so that a busy neighbour does not count.
"""

import gzip
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from rich.progress import track
from sklearn.metrics import ndcg_score  # type: ignore[import-untyped]

from hf_effattn import __version__, extend_positions, patch_attention, unpatch_attention
from hf_effattn.embedding.encoder import Encoder
from hf_effattn.embedding.pooling import stored_pooling
from hf_effattn.embedding.tokens import Tokens
from hf_effattn.patching.methods import make_method
from hf_effattn.samples.model import installed_model_folder, load_model
from hf_effattn.settings_parsing import method_of

from ..shared.command_line import check_names, run_with_help
from ..shared.data import dataset_path
from ..shared.runs import RESULTS, KeptRuns, print_table, run_folder

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "retrieval"
CUT, CHUNKS, EXACT = "cut at 512", "mean of chunks of 512", "exact"
# With their defaults, and how much of the loss is left at a smaller error.
METHODS: dict[str, dict[str, Any]] = {
    text: method_of(text)
    for text in ("clustered", "i-clustered", "bi-clustered", "bi-clustered clusters=100 topk=128 key_clusters=64")
}
KINDS = (CUT, CHUNKS, *METHODS, EXACT)  # of vectors, from cheap to dear
TRAINED_LENGTH = 512
RANKS = 10
SHOWN = ("method", "meetings", "queries", "ndcg_at_10", "seconds", "longest", "gain_of", "gain", "standard_error")


@dataclass(frozen=True)
class Meeting:
    """A document and the queries about it.

    Args:
        name (`str`): its id.
        text (`str`): a turn a line, `speaker: words`.
        queries (`tuple[str, ...]`): the specific ones.
    """

    name: str
    text: str
    queries: tuple[str, ...]


def rows_of(splits: list[str]) -> Iterator[dict[str, Any]]:
    """QMSum's own rows of some splits: train, val, test."""
    for split in splits:
        with gzip.open(dataset_path(f"qmsum/{split}.jsonl.gz"), "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def turns_of(row: dict[str, Any]) -> list[str]:
    """The turns of a meeting as its text has them, a line each."""
    return [f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"]]


def read_meetings(splits: list[str]) -> list[Meeting]:
    """The meetings of some splits."""
    return [
        Meeting(
            row["meeting_id"],
            "\n".join(turns_of(row)),
            tuple(query["query"].strip() for query in row["specific_query_list"]),
        )
        for row in rows_of(splits)
    ]


def ndcg_of_queries(documents: np.ndarray, queries: np.ndarray, relevant: np.ndarray) -> list[float]:
    """nDCG@10 of every query (Source: Järvelin 2002; scikit-learn's).

    Args:
        documents (`np.ndarray`): vectors of length 1, `(documents, d)`.
        queries (`np.ndarray`): the same, `(queries, d)`.
        relevant (`np.ndarray`): bool `(queries, documents)`.
    """
    scores = queries @ documents.T
    return [
        float(ndcg_score(wanted[None], score[None], k=RANKS)) for wanted, score in zip(relevant, scores, strict=True)
    ]


def relevance(meetings: list[Meeting]) -> tuple[list[str], np.ndarray]:
    """The different queries, and which meetings each was asked of, bool `(queries, meetings)`."""
    queries = list(dict.fromkeys(query for meeting in meetings for query in meeting.queries))
    return queries, np.array([[query in meeting.queries for meeting in meetings] for query in queries])


def embed_meeting(encoder: Encoder, tokens: Tokens, meeting: Meeting, name: str) -> dict[str, Any]:
    """The vector of a meeting by one of `KINDS`, as `kept_vector` has it."""
    settings = make_method(**METHODS[name]).to_dict() if name in METHODS else None
    path = run_folder(CACHE, name, [settings, __version__]) / f"{meeting.name}.npz"
    return kept_vector(encoder, tokens, meeting.text, name, path)


def kept_vector(encoder: Encoder, tokens: Tokens, text: str, name: str, path: Path) -> dict[str, Any]:
    """The vector of a text, the seconds it took and the tokens that it was made of; from a file where that is there.

    A text runs alone, and so does each of its chunks: nothing is padded.
    """
    if not path.exists():
        sequence, _ = tokens.sequence([text], TRAINED_LENGTH if name == CUT else None)
        start = time.process_time()
        document = tokens.chunks(sequence, TRAINED_LENGTH) if name == CHUNKS else [sequence]
        (vector,) = encoder.encode([document])
        seconds = time.process_time() - start
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".part.npz")
        np.savez(written, vector=vector, seconds=seconds, tokens=sum(map(len, document)))
        written.replace(path)
    with np.load(path) as kept:
        return dict(kept)


def measure(encoder: Encoder, tokens: Tokens, meetings: list[Meeting], name: str) -> dict[str, Any]:
    """A row: how well the vectors of one kind retrieve, and what they cost."""
    model = encoder.model
    if name in METHODS:
        patch_attention(model, **METHODS[name])
    try:
        embedded = [embed_meeting(encoder, tokens, meeting, name) for meeting in track(meetings, description=name)]
    finally:
        if name in METHODS:
            unpatch_attention(model)
    return {"method": name} | scores_of(encoder, tokens, meetings, embedded)


def scores_of(
    encoder: Encoder, tokens: Tokens, meetings: list[Meeting], embedded: list[dict[str, Any]]
) -> dict[str, Any]:
    """How well vectors of meetings, as `kept_vector` has them, are found by the queries, and what they cost."""
    queries, relevant = relevance(meetings)
    wanted = encoder.encode([[tokens.sequence([query])[0]] for query in queries])
    scores = ndcg_of_queries(np.stack([row["vector"] for row in embedded]), wanted, relevant)
    lengths = [int(row["tokens"]) for row in embedded]
    return {
        "meetings": len(meetings),
        "queries": len(queries),
        "ndcg_at_10": statistics.fmean(scores),
        "seconds": sum(float(row["seconds"]) for row in embedded),
        "tokens": sum(lengths),
        "shortest": min(lengths),
        "median": statistics.median(lengths),
        "longest": max(lengths),
        "ndcg_of_queries": [round(score, 4) for score in scores],
    }


def standard_error(values: np.ndarray, meetings: list[Meeting]) -> float:
    """Of the mean of what queries have, of which those about one meeting are not independent.

    Args:
        values (`np.ndarray`): `(queries,)`.
        meetings (`list[Meeting]`): a query that several have counts to the first.
    """
    _, relevant = relevance(meetings)
    of_meetings = np.bincount(relevant.argmax(axis=1), weights=values - values.mean(), minlength=len(meetings))
    count = len(meetings)
    return float((count / (count - 1) * (of_meetings**2).sum()) ** 0.5 / len(values))


def add_gains(kept: KeptRuns, meetings: list[Meeting]) -> None:
    """Rows of what every kind of vector gains over exact attention, query by query, once that has run."""
    for exact in kept.matching({"method": EXACT}):
        for row in [row for row in kept.rows if row.get("method") not in (None, EXACT)]:
            gains = np.array(row["ndcg_of_queries"]) - np.array(exact["ndcg_of_queries"])
            for gain in kept.missing([{"gain_of": row["method"]}]):
                kept.add(gain | {"gain": float(gains.mean()), "standard_error": standard_error(gains, meetings)})


def main(
    splits: Annotated[str, typer.Option(help="Comma-separated: train, val, test.")] = "test,val",
    methods: Annotated[str | None, typer.Option(help="Comma-separated; the default is all.")] = None,
    output: Path = RESULTS / "retrieval.json",
) -> None:
    """Measure every kind of vector and keep it as JSON."""
    chosen = methods.split(",") if methods else list(KINDS)
    check_names("methods", chosen, KINDS)
    meetings = read_meetings(splits.split(","))
    folder = installed_model_folder()
    model, tokenizer, name = load_model(None)
    tokens = Tokens(tokenizer)
    extend_positions(model, max(len(tokens.sequence([meeting.text])[0]) for meeting in meetings))
    encoder = Encoder(model, tokenizer, stored_pooling(folder), batch_tokens=TRAINED_LENGTH)
    kept = KeptRuns(output, {"model": name, "splits": splits, "dtype": "float32"}, torch.device("cpu"))
    for run in kept.missing({"method": kind} for kind in chosen):
        kept.add(measure(encoder, tokens, meetings, run["method"]))
    add_gains(kept, meetings)
    table = pd.DataFrame(kept.rows)
    print_table(table[[name for name in SHOWN if name in table]], kept.path)


if __name__ == "__main__":
    run_with_help(main, __doc__)
