r"""Fine-tune or evaluate an embedder of sentence-transformers on long texts, with `SentenceTransformerTrainer`.

Data are pairs (`anchor`, `positive`) or triplets (with a `negative`) of texts, from the Hub by name or from local
files. Of all texts of a batch, an anchor's own positive shall be the nearest. The loss embeds a few texts at a time
and keeps their vectors, so a batch may be large however long its texts are. The evaluators are those of
sentence-transformers.

    python scripts/train/embedding.py --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 \
        --extend_positions 8192 --method bi-clustered --train_files pairs.jsonl --validation_files held-out.jsonl \
        --output_dir runs/long --do_train --do_eval --per_device_train_batch_size 16
    python scripts/train/embedding.py --model_name_or_path BAAI/bge-m3 --settings effattn.json --max_length 8192 \
        --dataset_name sentence-transformers/natural-questions --columns query answer --output_dir runs/bge \
        --do_train --gradient_checkpointing --bf16

`hf_effattn.calibrate(model, texts, training=True).save("effattn.json")` finds such settings. `--resume_from_checkpoint
last` goes on from the newest checkpoint of the output folder. The metrics are printed and kept in `all_results.json`
there. The model is saved patched, and `SentenceTransformer(folder)` loads it so once `hf_effattn` is imported.
"""

import sys
import warnings
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import (
    InformationRetrievalEvaluator,
    SequentialEvaluator,
    TripletEvaluator,
)
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

import hf_effattn
from hf_effattn.data.text_pairs import GIVEN_BY, DataArguments, load_pairs
from hf_effattn.embedding.pooling import DOCUMENT_PROMPTS
from hf_effattn.hub.loading import check_source
from hf_effattn.ops.shared.precision import CPU_MULTIPLIES_BFLOAT16
from hf_effattn.patching.model_types.stacks import longest_input
from hf_effattn.patching.sentence_transformers import models_inside, set_max_seq_length
from hf_effattn.settings_parsing import method_of
from hf_effattn.training import RepeatableTrainer, check_splits, drawn_samples, keep_metrics, parsed_arguments, train

# What sentence-transformers calls the prompts of either side.
PROMPTS = {"query": ("query",), "document": DOCUMENT_PROMPTS}


@dataclass
class ModelArguments:
    """Which embedder, for how long texts, and whether a method replaces its attention."""

    model_name_or_path: str = field(
        metadata={
            "help": "Embedder to start from: a folder, or a name on the Hub. A model without a pooling gets the mean."
        }
    )
    model_revision: str | None = field(default=None, metadata={"help": "Its branch, tag or commit on the Hub."})
    method: str | None = field(
        default=None,
        metadata={"help": 'Method that replaces the attention, such as "bi-clustered clusters=100 topk=128".'},
    )
    settings: str | None = field(default=None, metadata={"help": "File of the settings that a calibration found."})
    extend_positions: int | None = field(
        default=None, metadata={"help": "Repeat the learned positions for texts of so many tokens."}
    )
    max_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of a text; longer ones are cut. Default: the model's own, or --extend_positions."},
    )


@dataclass
class LossArguments:
    """How near is near, and how much of a batch is computed at a time."""

    scale: float = field(default=20.0, metadata={"help": "Factor of the cosines: 1 / temperature."})
    mini_batch_size: int = field(
        default=1, metadata={"help": "Texts that are embedded at a time. More need more memory, and change rounding."}
    )


@dataclass
class TrainingArguments(SentenceTransformerTrainingArguments):
    """Batches in which no text stands twice: the loss would take it for a wrong answer to its own anchor."""

    batch_sampler: str = field(
        default="no_duplicates",
        metadata={
            "help": "How batches are drawn.",
            "choices": ["no_duplicates", "no_duplicates_hashed", "batch_sampler"],
        },
    )


class Trainer(RepeatableTrainer, SentenceTransformerTrainer):
    """`SentenceTransformerTrainer` whose resumed runs end as unbroken ones."""


def load_embedder(arguments: ModelArguments, device: Any) -> SentenceTransformer:
    """The embedder with its positions extended and its attention replaced, as the arguments say.

    Raises:
        ValueError: texts longer than its positions reach, a method that is none.
    """
    name, length = arguments.model_name_or_path, arguments.max_length
    model = SentenceTransformer(name, revision=arguments.model_revision, device=str(device))
    if arguments.extend_positions is not None:
        hf_effattn.extend_positions(model, arguments.extend_positions)
    if length is not None:
        reached = min((longest_input(inside) or length for inside in models_inside(model)), default=length)
        if reached < length:
            raise ValueError(
                f"--max_length {length}, but {name} has positions for {reached} tokens: pass --extend_positions"
                f" {length}, or lower --max_length"
            )
        set_max_seq_length(model, length)
    if arguments.method is not None or arguments.settings is not None:
        method = {} if arguments.method is None else method_of(arguments.method)
        hf_effattn.patch_attention(model, settings=arguments.settings, **method)
    return model


def prompts_of(model: SentenceTransformer, columns: list[str]) -> dict[str, str]:
    """The model's prompts by column, as `encode_query` and `encode_document` choose them: the trainer has none."""
    sides = ["query", *["document"] * (len(columns) - 1)]
    found = {
        column: next((model.prompts[name] for name in PROMPTS[side] if name in model.prompts), "")
        for column, side in zip(columns, sides, strict=True)
    }
    return {column: prompt for column, prompt in found.items() if prompt}


def evaluator_of(rows: Dataset, batch_size: int) -> SequentialEvaluator:
    """Whether anchors find their positives among all other texts, and which of triplets are nearer to the positive."""
    columns = {name: rows[name][:] for name in rows.column_names}
    anchors, positives, *negatives = columns.values()
    queries = {text: str(number) for number, text in enumerate(dict.fromkeys(anchors))}
    documents = {text: str(number) for number, text in enumerate(dict.fromkeys(chain(positives, *negatives)))}
    wanted: dict[str, set[str]] = {number: set() for number in queries.values()}
    for anchor, positive in zip(anchors, positives, strict=True):
        wanted[queries[anchor]].add(documents[positive])
    by_number = [{number: text for text, number in texts.items()} for texts in (queries, documents)]
    evaluators: list[Any] = [InformationRetrievalEvaluator(*by_number, wanted, batch_size=batch_size)]
    for name, texts in list(columns.items())[2:]:
        evaluators.append(TripletEvaluator(anchors, positives, texts, name=name, batch_size=batch_size))
    return SequentialEvaluator(evaluators, main_score_function=lambda scores: scores[0])


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate as the arguments say; returns the metrics."""
    model_arguments, data_arguments, loss_arguments, training = parsed_arguments(
        __doc__,
        command_line,
        DataArguments,
        TrainingArguments,
        model=ModelArguments,
        loss=LossArguments,
        instead_of_predictions="`effattn embed` embeds the documents of a folder",
    )
    if training.bf16 and training.device.type == "cpu" and not CPU_MULTIPLIES_BFLOAT16:
        warnings.warn("this processor has no instructions for bfloat16: it is faster without --bf16", stacklevel=2)
    check_source(model_arguments.model_name_or_path)
    data = load_pairs(data_arguments)
    check_splits(data, training, GIVEN_BY)
    data = drawn_samples(data, data_arguments.most, training.data_seed or 0)
    model = load_embedder(model_arguments, training.device)
    training.prompts = training.prompts or prompts_of(model, next(iter(data.values())).column_names)
    held_out = data.get("validation") if training.do_eval else None
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data.get("train"),
        evaluator=None if held_out is None else evaluator_of(held_out, training.per_device_eval_batch_size),
        loss=CachedMultipleNegativesRankingLoss(
            model, scale=loss_arguments.scale, mini_batch_size=loss_arguments.mini_batch_size
        ),
    )
    metrics = {"parameters": float(sum(weights.numel() for weights in model.parameters()))}
    if model.max_seq_length is not None:
        metrics["max_length"] = float(model.max_seq_length)
    if training.do_train:
        metrics |= train(trainer, training)
    if training.do_eval:
        metrics |= trainer.evaluate()
    keep_metrics(trainer, metrics)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
