r"""Train or evaluate a causal language model on text, with transformers' `Trainer`.

Data comes from the Hub by name or from local text files (gzip too); the tokenizer and the model from a checkpoint, or
both from scratch: a byte-level BPE of `--vocab_size` trained on the same text, a model of the given kind and sizes.

    python scripts/train/clm.py --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1 \
        --model_name_or_path gpt2 --output_dir runs/gpt2 --do_train --do_eval
    python scripts/train/clm.py --train_files texts/*.txt.gz --validation_files held-out.txt --vocab_size 6000 \
        --model_type gpt2 --config_overrides n_layer=4,n_embd=256,n_head=8 --output_dir runs/small \
        --do_train --do_eval --bf16

`--resume_from_checkpoint last` goes on from the newest checkpoint of the output folder. On a CPU, set
`MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000`: else glibc hands the buffers of every step back
to the system and has them cleared anew, which took more time than the arithmetic.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from hf_effattn.data.text_data import GIVEN_BY, DataArguments, blocks, load_texts, portions
from hf_effattn.training import (
    RepeatableTrainer,
    check_splits,
    drawn_samples,
    keep_metrics,
    length_settings,
    load_tokenizer,
    make_model,
    parsed_arguments,
    task_loss_alone,
    train,
    training_split,
    used_splits,
)


@dataclass
class CausalArguments(DataArguments):
    """Which text, how it is cut, and what the model is compared with."""

    ngram_losses: bool = field(
        default=False,
        metadata={"help": "Evaluate what counts of single tokens and of pairs reach too; 30 bytes a token of memory."},
    )


def tokens_per_word(texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> float:
    """Tokens, marks of an end among them, for each word between blanks: what makes tokenizers comparable."""
    tokens = words = 0
    for portion in portions(texts):
        encoded = tokenizer(portion, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        tokens += sum(len(ids) + 1 for ids in encoded)
        words += sum(len(text.split()) for text in portion)
    return tokens / words


def ngram_losses(train: Dataset, validation: Dataset, vocab_size: int) -> dict[str, float]:
    """What a model that knows the tokens' frequencies reaches, and one that also knows the token before.

    Nats per token on the validation text. The bigram's counts are interpolated with the unigram's (absolute
    discounting of 0.75), those with a uniform distribution.
    """
    seen = np.concatenate([np.asarray(row) for row in train["input_ids"]])
    held_out = np.concatenate([np.asarray(row) for row in validation["input_ids"]])
    counts = np.bincount(seen, minlength=vocab_size)
    unigram = (counts + 0.5) / (counts.sum() + 0.5 * vocab_size)
    pairs, pair_counts = np.unique(seen[:-1].astype(np.int64) * vocab_size + seen[1:], return_counts=True)
    before, after = held_out[:-1], held_out[1:]
    wanted = before.astype(np.int64) * vocab_size + after
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    observed = np.where(pairs[place] == wanted, pair_counts[place], 0)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)
    total = np.maximum(np.bincount(seen[:-1], minlength=vocab_size), 1)
    rest = np.where(followers > 0, 0.75 * followers / total, 1.0)
    bigram = np.maximum(observed - 0.75, 0) / total[before] + rest[before] * unigram[after]
    return {"unigram_loss": float(-np.log(unigram[held_out]).mean()), "bigram_loss": float(-np.log(bigram).mean())}


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate as the arguments say; returns the metrics of the evaluation."""
    no_predictions = "--do_eval measures a language model on held-out text"
    model_arguments, data_arguments, training = parsed_arguments(
        __doc__, command_line, CausalArguments, instead_of_predictions=no_predictions
    )
    if data_arguments.ngram_losses and not (training.do_train and training.do_eval):
        raise ValueError("--ngram_losses counts what is trained on, for the evaluation: pass --do_train and --do_eval")
    texts = load_texts(data_arguments)
    check_splits(texts, training, GIVEN_BY)

    def words() -> Iterator[str]:
        yield from chain.from_iterable(portions(training_split(texts)))

    tokenizer = load_tokenizer(model_arguments, training, words())
    length = data_arguments.block_length
    examples = blocks(used_splits(texts, training), tokenizer, length)
    examples = drawn_samples(examples, data_arguments.most, training.data_seed or 0)
    defaults = length_settings(model_arguments, tokenizer, length)
    trainer = RepeatableTrainer(
        model=make_model(model_arguments, AutoModelForCausalLM, tokenizer, defaults),
        args=training,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    metrics: dict[str, float] = {}
    if training.do_train:
        metrics |= train(trainer, training, model_arguments.save_dtype)
    if training.do_eval:
        with task_loss_alone(trainer.model):
            metrics |= trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        ratio = tokens_per_word(texts["validation"], tokenizer)
        metrics["word_perplexity"] = math.exp(metrics["eval_loss"] * ratio)
        metrics["parameters"] = float(trainer.model.num_parameters())
        metrics["validation_tokens"] = examples["validation"].num_rows * length
        if "train" in examples:
            metrics["train_tokens"] = examples["train"].num_rows * length
        if data_arguments.ngram_losses:
            metrics |= ngram_losses(examples["train"], examples["validation"], len(tokenizer))
    keep_metrics(trainer, metrics)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
