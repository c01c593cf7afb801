r"""Train or evaluate a masked language model on text, with transformers' `Trainer`; with pairs of texts, as BERT was.

Data comes from the Hub by name or from local text files (gzip too); the tokenizer and the model from a checkpoint, or
both from scratch. `--next_sentence` makes pairs, of which every second one does not belong together, for models with a
head for it (`BertForPreTraining`, `ClusterFormerForPreTraining`).

    python scripts/train/mlm.py --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1 \
        --model_name_or_path roberta-base --block_length 512 --output_dir runs/roberta --do_train --do_eval
    python scripts/train/mlm.py --train_files texts/*.txt.gz --validation_files held-out.txt --vocab_size 6000 \
        --model_type clusterformer --config_overrides num_hidden_layers=4,clusters=16 --block_length 256 \
        --next_sentence --output_dir runs/small --do_train --do_eval --bf16

`--resume_from_checkpoint last` goes on from the newest checkpoint of the output folder.
"""

import math
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    DataCollatorForLanguageModeling,
    EvalPrediction,
    PreTrainedTokenizerBase,
)

from hf_effattn.data.text_data import GIVEN_BY, DataArguments, blocks, load_texts, portions
from hf_effattn.training import (
    RepeatableTrainer,
    check_splits,
    drawn_samples,
    keep_metrics,
    length_settings,
    load_metric,
    load_tokenizer,
    make_model,
    parsed_arguments,
    task_loss_alone,
    train,
    training_split,
    used_splits,
)

FOLLOWS, RANDOM = 0, 1
NOT_MASKED = -100


@dataclass
class MaskArguments:
    """What is to be guessed."""

    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to guess."})
    next_sentence: bool = field(default=False, metadata={"help": "Also guess whether the second text follows."})


def documents(rows: Iterable[str], characters: int) -> Iterator[str]:
    """The rows, those that follow each other in one until it has so many characters."""
    lines: list[str] = []
    for row in rows:
        lines.append(row)
        if sum(map(len, lines)) >= characters:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def sentence_pairs(texts: Dataset, tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> Dataset:
    """Pairs of pieces of text, with their special tokens at most `length` tokens long.

    Of the pieces of a document, which follow each other, two make a pair; in every second pair, drawn at random, the
    later one is that of another pair. Rows of a text that comes line by line are put together to documents.

    Raises:
        ValueError: there are fewer than two pairs in the text.
    """
    pieces = (length - tokenizer.num_special_tokens_to_add(pair=True)) // 2
    pairs: list[tuple[str, str]] = []
    for text in documents(texts["text"], 16 * length):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = [start for start, _ in encoded["offset_mapping"]]
        cuts = [*places[::pieces], len(text)] if len(places) % pieces == 0 else places[::pieces]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        pairs += zip(parts[::2], parts[1::2], strict=False)
    if len(pairs) < 2:
        raise ValueError(f"the text has {len(pairs)} pairs of {length} tokens; give more text or less --block_length")
    draw = np.random.default_rng(seed)
    swapped = draw.random(len(pairs)) < 0.5
    # Another pair's second text, never the own one.
    other = (np.arange(len(pairs)) + draw.integers(1, len(pairs), len(pairs))) % len(pairs)
    second = [pairs[other[index] if swapped[index] else index][1] for index in range(len(pairs))]
    encoded = tokenizer([first for first, _ in pairs], second, truncation=True, max_length=length)
    return Dataset.from_dict({**encoded, "next_sentence_label": np.where(swapped, RANDOM, FOLLOWS)})


def examples_of(texts: DatasetDict, tokenizer: PreTrainedTokenizerBase, length: int, seed: int | None) -> DatasetDict:
    """The splits as tokens: pairs drawn with `seed`, or running text where that is None."""
    if seed is None:
        return blocks(texts, tokenizer, length).remove_columns("labels")
    return DatasetDict({split: sentence_pairs(rows, tokenizer, length, seed) for split, rows in texts.items()})


@dataclass
class RepeatableMasks(DataCollatorForLanguageModeling):
    """Masks that depend on the batch and the seed alone.

    transformers' collator draws from one stream. A loader prepares a batch ahead, so a run that is resumed would go on
    with other masks than one that was never stopped. Batches of several texts are other ones in every epoch; with one
    text a batch its masks stay the same.
    """

    # Not `seed`: with one, transformers 5.24 replaces a generator that it did not make itself.
    mask_seed: int = 0

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """The batch, its masked words as `labels`."""
        words = np.concatenate([example["input_ids"] for example in examples])
        self.generator = torch.Generator().manual_seed(zlib.crc32(words.astype(np.int64).tobytes(), self.mask_seed))
        return super().torch_call(examples)


def guesses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: Any) -> tuple[torch.Tensor, ...]:
    """The likeliest words, and the likeliest relation of the texts where there are two labels."""
    tensors = logits if isinstance(logits, tuple) else (logits,)
    count = len(labels) if isinstance(labels, tuple | list) else 1
    return tuple(tensor.argmax(dim=-1) for tensor in tensors[:count])


def compute_metrics(prediction: EvalPrediction, metric: Any) -> dict[str, float]:
    """Accuracy on the masked words, and on the relation of the texts."""
    several = isinstance(prediction.label_ids, tuple)
    words = prediction.label_ids[0] if several else prediction.label_ids
    guessed = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    masked = words != NOT_MASKED
    metrics = dict(metric.compute(predictions=guessed[masked], references=words[masked]))
    if several:
        relation = metric.compute(predictions=prediction.predictions[1], references=prediction.label_ids[1].flatten())
        metrics["next_sentence_accuracy"] = relation["accuracy"]
    return metrics


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate as the arguments say; returns the metrics of the evaluation."""
    no_predictions = "--do_eval measures a language model on held-out text"
    model_arguments, data_arguments, mask_arguments, training = parsed_arguments(
        __doc__, command_line, DataArguments, masks=MaskArguments, instead_of_predictions=no_predictions
    )
    texts = load_texts(data_arguments)
    check_splits(texts, training, GIVEN_BY)
    paired = mask_arguments.next_sentence

    def words() -> Iterator[str]:
        yield from chain.from_iterable(portions(training_split(texts)))

    tokenizer = load_tokenizer(model_arguments, training, words(), pairs=paired, masks=True)
    length = data_arguments.block_length
    examples = examples_of(used_splits(texts, training), tokenizer, length, training.seed if paired else None)
    examples = drawn_samples(examples, data_arguments.most, training.data_seed or 0)
    metric = load_metric("accuracy")
    auto_class = AutoModelForPreTraining if paired else AutoModelForMaskedLM
    trainer = RepeatableTrainer(
        model=make_model(model_arguments, auto_class, tokenizer, length_settings(model_arguments, tokenizer, length)),
        args=training,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=RepeatableMasks(
            tokenizer, mlm_probability=mask_arguments.mlm_probability, mask_seed=training.seed
        ),
        compute_metrics=lambda prediction: compute_metrics(prediction, metric),
        preprocess_logits_for_metrics=guesses,
    )
    metrics: dict[str, float] = {"parameters": float(trainer.model.num_parameters())}
    if training.do_train:
        metrics |= train(trainer, training, model_arguments.save_dtype)
    if training.do_eval:
        with task_loss_alone(trainer.model):
            metrics |= trainer.evaluate()
        if not paired:
            metrics["perplexity"] = math.exp(metrics["eval_loss"])
    keep_metrics(trainer, metrics)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
