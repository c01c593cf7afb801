"""Runs `TextEncoder` on the real Ray Data and Spark, as the package's page on corpora shows it, on this machine.

The vectors are compared with those of a call in this process, bit for bit: each text runs alone.

    pip install 'ray[data]' pyspark              # Spark needs Java, 17 or newer
    python -m scripts.reliability.engines        # writes scripts/results/engines.json
"""

import importlib.metadata
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import BertConfig, BertModel

from hf_effattn.embedding import TextEncoder

from ..shared.command_line import run_with_help
from ..shared.runs import RESULTS, KeptRuns, print_rows
from ._tiny import save_tokenizer

PROCESSES, BATCH = 2, 8
SETTINGS: dict[str, Any] = {"method": "i-clustered clusters=8 topk=8 min_length=0", "threads": 1, "batch_tokens": 1}
Rows = list[dict[str, Any]]


def by_ray(model: str, rows: Rows) -> Rows:
    """With a model in each of several actors."""
    import ray

    ray.init(num_cpus=PROCESSES + 1, include_dashboard=False)
    try:
        encoded = ray.data.from_items(rows).map_batches(
            TextEncoder,
            fn_constructor_args=[model],
            fn_constructor_kwargs=SETTINGS,
            compute=ray.data.ActorPoolStrategy(size=PROCESSES),
            batch_size=BATCH,
        )
        taken: Rows = encoded.take_all()
    finally:
        ray.shutdown()
    return taken


def by_spark(model: str, rows: Rows) -> Rows:
    """With a model for each partition."""
    from pyspark.sql import SparkSession

    encode = TextEncoder(model, **SETTINGS)
    spark = SparkSession.builder.master(f"local[{PROCESSES}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        frame = spark.createDataFrame(rows, "id long, text string").repartition(PROCESSES)
        encoded = frame.mapInPandas(
            lambda frames: map(encode, frames), "id long, text string, vector array<float>"
        ).collect()
    finally:
        spark.stop()
    return [row.asDict() for row in encoded]


ENGINES: dict[str, Callable[[str, Rows], Rows]] = {"ray": by_ray, "pyspark": by_spark}


def equal_rows(engine: str, rows: Rows, model: str) -> int:
    """How many of the texts get the bits of a call in this process."""
    expected = TextEncoder(model, **SETTINGS)({"text": [row["text"] for row in rows]})["vector"]
    encoded = {row["id"]: row for row in ENGINES[engine](model, rows)}
    return sum(
        encoded[row["id"]]["text"] == row["text"]
        and np.array_equal(np.asarray(encoded[row["id"]]["vector"], np.float32), vector)
        for row, vector in zip(rows, expected, strict=True)
    )


def save_model(folder: Path) -> list[str]:
    """Write a random BERT; its words."""
    words = save_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(words) + 2, pad_token_id=0, **sizes)).save_pretrained(folder)
    return words


def main(
    texts: Annotated[int, typer.Option(help="How many.")] = 100,
    output: Annotated[Path, typer.Option(help="JSON file of the results.")] = RESULTS / "engines.json",
) -> None:
    kept = KeptRuns(output, {"texts": texts})
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    drawn = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        words = save_model(Path(folder))
        rows = [{"id": n, "text": " ".join(drawn.choices(words, k=drawn.randint(1, 400)))} for n in range(texts)]
        for engine in ENGINES:
            try:
                run = {"engine": engine, "version": importlib.metadata.version(engine)}
            except importlib.metadata.PackageNotFoundError:
                print(f"{engine} is not installed")
                continue
            if kept.missing([run]):
                kept.add(run | {"equal_rows": equal_rows(engine, rows, folder)})
    print_rows(kept)


if __name__ == "__main__":
    run_with_help(main, __doc__)
