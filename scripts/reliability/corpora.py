"""Divides a corpus among processes of `effattn embed`: seconds, bits of the vectors, and whether kills change them.

The documents are generated, of 100 to 20,000 tokens, as many in each octave. The model is a random BERT of one layer,
64 wide, with bi-clustered attention. Processes are started one by one with `RANK` and `WORLD_SIZE`, as launchers do.
In the last run random ones are killed at random moments, and each is started again.

    python -m scripts.reliability.corpora        # writes scripts/results/corpora.json

What the output file holds is not run again. Run nothing else on the machine meanwhile: seconds include the starts.
"""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import BertConfig, BertModel

from hf_effattn.reporting.numbers import count

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._tiny import save_tokenizer

SHORTEST = 100
METHOD = "bi-clustered"
# Processes and the threads of each.
DIVISIONS = ((1, 2), (1, 1), (2, 1), (4, 1))


def save_corpus(folder: Path, documents: int, longest: int) -> tuple[Path, Path]:
    """Write a model and documents.

    Args:
        folder (`Path`): where.
        documents (`int`): how many.
        longest (`int`): tokens of the longest that may be drawn.

    Returns:
        `(Path, Path)`: the model's folder, and the documents in JSON Lines.
    """
    model, corpus, drawn = folder / "model", folder / "documents.jsonl", random.Random(0)
    words = save_tokenizer(model)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    config = BertConfig(vocab_size=len(words) + 2, max_position_embeddings=longest, pad_token_id=0, **sizes)
    BertModel(config).save_pretrained(model)
    with corpus.open("w", encoding="utf-8") as file:
        for number in range(documents):
            length = round(math.exp(drawn.uniform(math.log(SHORTEST), math.log(longest))))
            file.write(json.dumps({"id": number, "text": " ".join(drawn.choices(words, k=length))}) + "\n")
    return model, corpus


class Launch:
    """The processes of one run.

    Args:
        command (`list[str]`): of each.
        processes (`int`): how many.
        threads (`int`): of each.
        folder (`Path`): gets what each says.
    """

    def __init__(self, command: list[str], processes: int, threads: int, folder: Path) -> None:
        self._command, self._folder = command, folder
        self._environment = os.environ | {
            "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"
        }  # fmt: skip
        self._ranks = [self._start(rank) for rank in range(processes)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        with self._said(rank).open("ab") as said:
            environment = self._environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return subprocess.Popen(self._command, env=environment, stdout=said, stderr=said)

    def _said(self, rank: int) -> Path:
        return self._folder / f"said-{rank}"

    def kill_one(self, drawn: random.Random) -> bool:
        """Kill a random one of those that run and start it again; whether any ran."""
        running = [rank for rank, process in enumerate(self._ranks) if process.poll() is None]
        if running:
            rank = drawn.choice(running)
            self._ranks[rank].kill()
            self._ranks[rank].wait()
            self._ranks[rank] = self._start(rank)
        return bool(running)

    def wait(self) -> None:
        """Until all have ended.

        Raises:
            RuntimeError: one failed; with the last line that it said.
        """
        for rank, process in enumerate(self._ranks):
            if process.wait() != 0:
                raise RuntimeError(f"rank {rank}: {self._said(rank).read_text(encoding='utf-8').splitlines()[-1:]}")


def run_once(
    corpus: tuple[Path, Path], folder: Path, processes: int, threads: int, kills: int, expected: float
) -> dict[str, Any]:
    """Embed a corpus; what came of it.

    Args:
        corpus (`(Path, Path)`): the model and the documents.
        folder (`Path`): new, for the result.
        processes (`int`): how many.
        threads (`int`): of each.
        kills (`int`): of random processes, at random moments.
        expected (`float`): the seconds that an unbroken run takes.

    Returns:
        `dict`: `seconds`, a hash of the result, and `killed`, how many were still running when their turn came.
    """
    folder.mkdir()
    output, drawn, killed = folder / "vectors", random.Random(0), 0
    arguments = [*map(str, corpus), "--output", str(output), "--method", METHOD]
    start = time.monotonic()
    launch = Launch([sys.executable, "-m", "hf_effattn", "embed", *arguments], processes, threads, folder)
    for _ in range(kills):
        time.sleep(drawn.uniform(0, 2 * expected / (kills + 1)))
        killed += launch.kill_one(drawn)
    launch.wait()
    seconds = time.monotonic() - start
    result = hashlib.sha256()
    for name in ("vectors.npy", "ids.jsonl"):
        result.update((output / name).read_bytes())
    return {"seconds": seconds, "killed": killed, "result": result.hexdigest()[:16]}


def main(
    documents: Annotated[int, typer.Option(help="How many.")] = 10_000,
    longest: Annotated[int, typer.Option(help="Tokens of the longest document.")] = 20_000,
    kills: Annotated[int, typer.Option(help="Of random processes, in one run.")] = 20,
    output: Annotated[Path, typer.Option(help="JSON file of the results; runs in it are kept.")] = (
        RESULTS / "corpora.json"
    ),
) -> None:
    kept = KeptRuns(output, {"documents": documents, "tokens": [SHORTEST, longest], "method": METHOD})
    runs = [{"processes": n, "threads_each": threads, "kills": 0} for n, threads in DIVISIONS]
    runs.append(runs[-1] | {"kills": kills})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = save_corpus(folder, documents, longest)
        for run in kept.missing(runs):
            unbroken = kept.matching(run | {"kills": 0})
            expected = unbroken[0]["seconds"] if unbroken else 0.0
            place = folder / "-".join(map(str, run.values()))
            kept.add(run | run_once(corpus, place, run["processes"], run["threads_each"], run["kills"], expected))
    print_rows(kept)
    seconds = {(row["processes"], row["threads_each"]): row["seconds"] for row in kept.rows if not row["kills"]}
    for one in (seconds[1, 2], seconds[1, 1]):
        print(f"2 processes of 1 thread are {one / seconds[2, 1]:.2f} times as fast as 1 process in {one:.0f} s")
    by_threads = Counter((row["threads_each"], row["result"]) for row in kept.rows)
    for (threads, result), number in by_threads.items():
        print(f"{count(number, 'run')}, {count(threads, 'thread')} in each process: {result}")


if __name__ == "__main__":
    run_with_help(main, __doc__)
