r"""Train or evaluate a model that translates, with transformers' `Seq2SeqTrainer`.

Data comes from the Hub by name, or from local files of which line i of one is the translation of line i of the other
(gzip too). The model is a checkpoint or one from scratch; that gets a BPE which is trained on both languages, where no
tokenizer is named. A multilingual checkpoint wants its languages in its tokenizer's own settings.

    python scripts/train/translation.py --train_source train.de.gz --train_target train.en.gz --validation_source \
        val.de.gz --validation_target val.en.gz --model_type clusterformer --config_overrides \
        clusters=3,decoder_assignment=full,num_attention_heads=4,max_position_embeddings=128 \
        --output_dir runs/clusterformer --do_train --do_eval --label_smoothing_factor 0.1 \
        --train_sampling_strategy group_by_length
    python scripts/train/translation.py --dataset_name bentrevett/multi30k --source_lang de --target_lang en \
        --model_name_or_path Helsinki-NLP/opus-mt-de-en --num_beams 4 --output_dir runs/marian --do_predict
    python scripts/train/translation.py --dataset_name wmt/wmt16 --dataset_config_name de-en --source_lang en \
        --target_lang de --model_name_or_path google-t5/t5-small --source_prefix "translate English to German: " \
        --max_train_samples 10000 --output_dir runs/t5 --do_train --do_eval

The Transformer in the same code is `--model_type clusterformer` with `assignment=full`. `--resume_from_checkpoint
last` goes on from the newest checkpoint of the output folder. The metrics are printed and kept in `all_results.json`
there, the translations, a line each, in `eval_translations.txt` and `test_translations.txt`; BLEU is sacrebleu's, of
text that is not tokenized. `--prediction_loss_only` evaluates without translating.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_effattn.data.translation_data import GIVEN_BY, DataArguments, load_pairs
from hf_effattn.models.clusterformer.heads import IGNORED, total_loss
from hf_effattn.models.clusterformer.outputs import ClusteringOutput
from hf_effattn.training import (
    RepeatableTrainer,
    check_splits,
    drawn_samples,
    keep_metrics,
    load_metric,
    load_tokenizer,
    make_model,
    parsed_arguments,
    train,
    training_split,
)

PADDING, START = "<|pad|>", "<|start|>"


class TranslationTrainer(RepeatableTrainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with orders that repeat, which trains clusterings with smoothed labels too."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's own; it smooths labels outside of the model, whose other losses are added again here."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.label_smoother is not None and isinstance(outputs, ClusteringOutput):
            loss = total_loss(self.model.config, loss, outputs)
        return (loss, outputs) if return_outputs else loss


class PairCollator(DataCollatorForSeq2Seq):
    """Pads sources and translations; the decoder is told which words are padding."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: str | None = None) -> Any:
        batch = super().__call__(features, return_tensors)
        # Earlier words are safe from padding by the causal mask, clusters and their losses are not.
        if "decoder_input_ids" in batch:
            batch["decoder_attention_mask"] = (batch["labels"] != IGNORED).long()
        return batch


def separate_marks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let every text end with a mark; start and padding get marks of their own where the end stood for them.

    Raises:
        ValueError: the tokenizer has marks of its own, and none of them ends a text.
    """
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id) and tokenizer.eos_token_id is not None:
        tokenizer.add_special_tokens({"pad_token": PADDING, "bos_token": START})
        end = (tokenizer.eos_token, tokenizer.eos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    if tokenizer("")["input_ids"][-1:] != [tokenizer.eos_token_id]:
        raise ValueError("a translation would have no end: the tokenizer puts no eos_token behind a text")


def translate_marks(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the translations of a model from scratch start and end with the tokenizer's marks."""
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    for settings in (model.config, model.generation_config):
        settings.decoder_start_token_id = start
        # What some kinds of model put at the end of a translation that is too long.
        if getattr(settings, "forced_eos_token_id", None) is not None:
            settings.forced_eos_token_id = tokenizer.eos_token_id


def tokenize_pairs(
    rows: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, arguments: DataArguments
) -> dict[str, list[list[int]]]:
    """Token numbers of the texts, with their mask, and of their translations."""
    texts = [arguments.source_prefix + text for text in rows["source"]]
    inputs = tokenizer(texts, truncation=True, max_length=arguments.max_source_length)
    targets = tokenizer(text_target=rows["target"], truncation=True, max_length=arguments.max_target_length)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"labels": targets["input_ids"]}


def score_translations(
    prediction: EvalPrediction, references: list[str], tokenizer: PreTrainedTokenizerBase, path: Path | None
) -> dict[str, float]:
    """BLEU of the translations, which are written to a file if one is named; a line each."""
    numbers = np.where(prediction.predictions == IGNORED, tokenizer.pad_token_id, prediction.predictions)
    texts = [" ".join(text.split()) for text in tokenizer.batch_decode(numbers, skip_special_tokens=True)]
    if path is not None:
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    metrics = load_metric("sacrebleu").compute(predictions=texts, references=references)
    # Trainer logs single numbers only.
    return {"bleu": metrics["score"]} | {name: metrics[name] for name in ("bp", "sys_len", "ref_len")}


def main(command_line: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate and translate as the arguments say; returns the metrics."""
    model_arguments, data_arguments, training = parsed_arguments(
        __doc__, command_line, DataArguments, Seq2SeqTrainingArguments
    )
    data = load_pairs(data_arguments)
    check_splits(data, training, GIVEN_BY)

    def texts() -> Iterator[str]:
        for column in ("source", "target"):
            yield from training_split(data)[column]

    tokenizer = load_tokenizer(model_arguments, training, texts())
    if model_arguments.model_name_or_path is None:
        separate_marks(tokenizer)
    model = make_model(model_arguments, AutoModelForSeq2SeqLM, tokenizer, {})
    if model_arguments.model_name_or_path is None:
        translate_marks(model, tokenizer)
    most = {
        "train": data_arguments.max_train_samples,
        "validation": data_arguments.max_eval_samples,
        "test": data_arguments.max_predict_samples,
    }
    data = drawn_samples(data, most, data_arguments.sample_seed)
    examples = data.map(
        partial(tokenize_pairs, tokenizer=tokenizer, arguments=data_arguments),
        batched=True,
        remove_columns=["source", "target"],
    )
    training.predict_with_generate = True
    training.generation_num_beams = training.generation_num_beams or data_arguments.num_beams
    # The mark that every translation starts with counts too.
    training.generation_max_length = training.generation_max_length or data_arguments.max_target_length + 1

    def scorer(split: str, name: str) -> Any:
        path = Path(training.output_dir) / f"{name}_translations.txt" if training.should_save else None
        return partial(score_translations, references=data[split]["target"], tokenizer=tokenizer, path=path)

    trainer = TranslationTrainer(
        model=model,
        args=training,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=PairCollator(tokenizer, model, label_pad_token_id=IGNORED),
        compute_metrics=scorer("validation", "eval") if "validation" in data else None,
    )
    metrics = {"parameters": float(model.num_parameters())}
    if training.do_train:
        metrics |= train(trainer, training, model_arguments.save_dtype)
    if training.do_eval:
        metrics |= trainer.evaluate()
    if training.do_predict:
        trainer.compute_metrics = scorer("test", "test")
        metrics |= trainer.predict(examples["test"]).metrics
    keep_metrics(trainer, metrics)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
