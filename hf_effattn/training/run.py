"""What the training scripts share: which model and tokenizer, how a method replaces its attention, and the run itself.

Every script takes `ModelArguments`, its own data arguments and transformers' `TrainingArguments` on the command line.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoTokenizer,
    ByT5Tokenizer,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

import hf_effattn

from ..models.clusterformer import log_clustering
from ..patching.model_types import MODEL_TYPES
from .command_line import NO_MODEL, ModelArguments, parse_settings

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
BYTES = "bytes"
METRICS = Path(__file__).parent / "metrics"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, pairs: bool = False, masks: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2 has one, fitted on the texts.

    Args:
        texts (`Iterable[str]`): what it is fitted on.
        vocab_size (`int`): tokens, at least 257.
        pairs (`bool`): put the mark of a text's end before the first text and between the two, and number them by
            `token_type_ids`. Otherwise there is nothing but the text.
        masks (`bool`): have a mask token.
    """
    bpe = ByteLevelBPETokenizer()
    special = [END_OF_TEXT, MASK] if masks else [END_OF_TEXT]
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=special, show_progress=False)
    if pairs:
        bpe._tokenizer.post_processor = TemplateProcessing(
            single=f"{END_OF_TEXT} $A",
            pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B:1",
            special_tokens=[(END_OF_TEXT, bpe.token_to_id(END_OF_TEXT))],
        )
    segments = ["token_type_ids"] if pairs else []
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        model_input_names=["input_ids", *segments, "attention_mask"],
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK if masks else None,
    )


def checkpoint_to_resume(training: TrainingArguments) -> str | None:
    """The checkpoint that the arguments name; for `last` the newest whole one of the output folder, or None."""
    resume: str | None = training.resume_from_checkpoint
    if resume != "last":
        return resume
    found = sorted(Path(training.output_dir).glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1]))
    return next((str(path) for path in found if is_whole(path)), None)


def is_whole(checkpoint: Path) -> bool:
    """Whether Trainer had written it to the end: a process that is killed leaves one without what comes last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return True


def is_finished(checkpoint: Path, training: TrainingArguments) -> bool:
    """Whether it is of the last step that the arguments ask for.

    Raises:
        ValueError: it was trained for longer than they ask for.
    """
    state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    by_steps = training.max_steps > 0
    asked = training.max_steps if by_steps else training.num_train_epochs
    done = state["global_step"] if by_steps else state["epoch"]
    if done > asked:
        unit = "steps" if by_steps else "epochs"
        raise ValueError(
            f"{checkpoint} has had {done:g} {unit}, more than the {asked:g} asked for: name another --output_dir, or"
            " leave out --resume_from_checkpoint"
        )
    # Trainer counts epochs by whole steps, so the last may end a little before a whole number.
    same = by_steps or state["num_train_epochs"] >= training.num_train_epochs
    return bool(same and state["global_step"] >= (asked if by_steps else state["max_steps"]))


def final_weights(checkpoint: Path, training: TrainingArguments) -> Path:
    """Where the weights lie with which a run ended whose last checkpoint this is.

    With `load_best_model_at_end` that is the best checkpoint: where it was, or beside this one if the folder has been
    moved. Where it is gone, it is the model that was saved at the end.

    Raises:
        FileNotFoundError: neither is there.
    """
    state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    recorded = state["best_model_checkpoint"]
    if not training.load_best_model_at_end or recorded is None:
        return checkpoint
    for place in (Path(recorded), checkpoint.with_name(Path(recorded).name)):
        if is_whole(place):
            return place
    end = Path(training.output_dir)
    if is_whole(end) and any(end.glob("model*.safetensors")):
        ended_at = json.loads((end / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]
        if ended_at == state["global_step"]:
            return end
    raise FileNotFoundError(
        f"the best checkpoint {recorded} is gone, and {end} has no model that was saved after it: put it back, or"
        " leave out --load_best_model_at_end to go on with the last"
    )


def training_split(data: DatasetDict) -> Dataset:
    """The split that a tokenizer is made of: the one to train on, or where there is none the first."""
    return data.get("train", data[next(iter(data))])


def load_tokenizer(
    arguments: ModelArguments, training: TrainingArguments, texts: Iterable[str], **kinds: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer that is named, the model's, that of a run which is resumed, or one made of `texts`.

    `kinds` are what `train_tokenizer` can be asked for; bytes and existing tokenizers are what they are.
    """
    if arguments.tokenizer_name == BYTES:
        return ByT5Tokenizer(extra_ids=0)
    if arguments.tokenizer_name is None and arguments.model_name_or_path is not None:
        return AutoTokenizer.from_pretrained(arguments.model_name_or_path, revision=arguments.model_revision)
    name = arguments.tokenizer_name or checkpoint_to_resume(training)
    return AutoTokenizer.from_pretrained(name) if name else train_tokenizer(texts, arguments.vocab_size, **kinds)


def make_model(
    arguments: ModelArguments, auto_class: Any, tokenizer: PreTrainedTokenizerBase, defaults: dict[str, Any]
) -> Any:
    """The checkpoint, or a model of `model_type` with random weights; its attention replaced where a method is named.

    The tokenizer of a model from scratch is told how many tokens it takes, which is what pipelines cut texts to.

    Args:
        arguments (`ModelArguments`): which model.
        auto_class: transformers' class that makes it, such as `AutoModelForCausalLM`.
        tokenizer (`PreTrainedTokenizerBase`): gives the vocabulary and special tokens of a model from scratch.
        defaults (`dict`): settings that the task wants, such as `num_labels`; `config_overrides` win.

    Raises:
        ValueError: neither a checkpoint nor a kind of model is named, or a setting that the model does not know.
    """
    overrides = defaults | parse_settings(arguments.config_overrides)
    if arguments.model_name_or_path is not None:
        path, revision = arguments.model_name_or_path, arguments.model_revision
        # One that was saved with its attention replaced comes back so.
        patched = getattr(AutoConfig.from_pretrained(path, revision=revision), "effattn", None) is not None
        load = partial(hf_effattn.from_pretrained, auto_class) if patched else auto_class.from_pretrained
        options: dict[str, Any] = {"revision": revision, "ignore_mismatched_sizes": arguments.ignore_mismatched_sizes}
        model = load(path, **options, **overrides)
    elif arguments.model_type is not None:
        special = {
            name: getattr(tokenizer, name)
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
            if getattr(tokenizer, name) is not None
        }
        config = AutoConfig.for_model(arguments.model_type)
        unknown = [name for name in overrides if not hasattr(config, name)]
        if unknown:
            raise ValueError(f"a {arguments.model_type!r} model has no setting {', '.join(map(repr, unknown))}")
        config = AutoConfig.for_model(arguments.model_type, **{"vocab_size": len(tokenizer)} | special | overrides)
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None:
            tokenizer.model_max_length = positions - reserved_positions(arguments.model_type, tokenizer)
        model = auto_class.from_config(config)
    else:
        raise ValueError(NO_MODEL)
    if arguments.method is not None:
        hf_effattn.patch_attention(model, arguments.method, **parse_settings(arguments.method_settings))
    return model


def length_settings(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, int]:
    """What the configuration of a model from scratch needs to take texts of `length` tokens; nothing for others."""
    if arguments.model_type is None or arguments.model_name_or_path is not None:
        return {}
    # One name of the longest input for GPT-2, another for all others.
    name = "n_positions" if arguments.model_type == "gpt2" else "max_position_embeddings"
    if not hasattr(AutoConfig.for_model(arguments.model_type), name):
        return {}
    return {name: length + reserved_positions(arguments.model_type, tokenizer)}


def reserved_positions(model_type: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Positions that no token has, as RoBERTa's begin behind the number of the padding."""
    known = MODEL_TYPES.get(model_type)
    shifted = known is not None and known.positions is not None and known.positions.reserved_by_padding
    return tokenizer.pad_token_id + 1 if shifted else 0


def tokenize_texts(
    rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, columns: Sequence[str], max_length: int
) -> dict[str, Any]:
    """Token numbers of texts, or of pairs where two columns are named, cut to the length that is allowed."""
    return dict(tokenizer(*(rows[column] for column in columns), truncation=True, max_length=max_length))


def drawn_samples(data: DatasetDict, most: dict[str, int | None], seed: int) -> DatasetDict:
    """The data with no more rows in a split than `most` says; which ones they are, `seed` decides."""
    chosen = {}
    for split, rows in data.items():
        count = most.get(split)
        chosen[split] = rows if count is None else rows.shuffle(seed=seed).select(range(min(len(rows), count)))
    return DatasetDict(chosen)


def used_splits(data: DatasetDict, training: TrainingArguments) -> DatasetDict:
    """The splits to train, evaluate and predict on, of those that there are."""
    used = {"train": training.do_train, "validation": training.do_eval, "test": training.do_predict}
    return DatasetDict({split: data[split] for split, is_used in used.items() if is_used and split in data})


def label_settings(names: Sequence[str]) -> dict[str, Any]:
    """Settings of a classifier's configuration: its classes by their numbers."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def first_logits(prediction: EvalPrediction) -> np.ndarray:
    """The logits `(examples, classes)`, which stand first where a model returns more."""
    logits = prediction.predictions
    return logits[0] if isinstance(logits, tuple) else logits


def accuracy() -> Callable[[EvalPrediction], dict[str, float]]:
    """Share of examples whose likeliest class is theirs, as `Trainer` calls it."""
    metric = load_metric("accuracy")

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        found = np.argmax(first_logits(prediction), axis=1)
        return metric.compute(predictions=found, references=prediction.label_ids)

    return compute


def run_classifier(
    trainer: Trainer,
    training: TrainingArguments,
    test: Dataset | None,
    save_dtype: str | None,
    keep_classes: Callable[[np.ndarray], None] | None = None,
) -> dict[str, float]:
    """Train, evaluate and test as the arguments say; the metrics, which are kept too.

    `keep_classes` is called once, with the likeliest classes of the test.
    """
    metrics = {"parameters": float(trainer.model.num_parameters())}
    if training.do_train:
        metrics |= train(trainer, training, save_dtype)
    if training.do_eval:
        metrics |= trainer.evaluate()
    if training.do_predict:
        found = trainer.predict(test)
        metrics |= found.metrics
        if keep_classes is not None and trainer.is_world_process_zero():
            keep_classes(np.argmax(first_logits(found), axis=1))
    keep_metrics(trainer, metrics)
    return metrics


def load_metric(name: str, config_name: str | None = None) -> Any:
    """A metric that lies in the repository, by `evaluate`: no Hub is needed, the keys are the Hub's."""
    return evaluate.load(str(METRICS / name), config_name)


def train(trainer: Trainer, training: TrainingArguments, save_dtype: str | None = None) -> dict[str, float]:
    """Train, from a checkpoint where the arguments name one (`last`: the newest); save the model and the log.

    The log of a ClusterFormer tells of its clusters too. What is evaluated afterwards is the model as it was saved. A
    checkpoint of the last step, or the best one where `load_best_model_at_end` asks for it, is loaded and not trained
    any further.

    Args:
        trainer (`Trainer`): with its model and data.
        training (`TrainingArguments`): its arguments.
        save_dtype (`str`, *optional*): number type of the weights that are saved. Default: as trained.

    Returns: the metrics of the training; none where nothing was left to train.

    Raises:
        ValueError: smoothed labels for a ClusterFormer by a Trainer that would lose the losses of its clusters.
        FileNotFoundError: the best checkpoint of a finished run is asked for, and gone.
    """
    if trainer.model.config.model_type == "clusterformer":
        if training.label_smoothing_factor and type(trainer).compute_loss is Trainer.compute_loss:
            raise ValueError("label_smoothing_factor makes Trainer leave out the losses of the clusters: pass 0")
        log_clustering(trainer)
    checkpoint = checkpoint_to_resume(training)
    metrics: dict[str, float] = {}
    if checkpoint is not None and is_finished(Path(checkpoint), training):
        # Trainer would take a step more.
        trainer._load_from_checkpoint(str(final_weights(Path(checkpoint), training)))
        trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    else:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    if save_dtype is not None:
        trainer.model.to(getattr(torch, save_dtype))
    trainer.save_model()
    trainer.save_state()
    return metrics


@contextmanager
def task_loss_alone(model: PreTrainedModel) -> Iterator[None]:
    """Let a ClusterFormer's loss be that of its task, of which perplexities are made, without its clusters'."""
    names = {"cluster_loss_weight": 0.0, "sorting_loss_weight": 0.0, "task_loss_weight": 1.0}
    kept = {name: getattr(model.config, name) for name in names if hasattr(model.config, name)}
    try:
        for name in kept:
            setattr(model.config, name, names[name])
        yield
    finally:
        for name, value in kept.items():
            setattr(model.config, name, value)


def write_predictions(path: Path, predictions: Iterable[tuple[int, Any]]) -> None:
    """A file as GLUE's server takes it: a line for each example, with its number from 0."""
    with path.open("w", encoding="utf-8") as file:
        file.write("index\tprediction\n")
        file.writelines(f"{index}\t{value}\n" for index, value in predictions)


def keep_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Write the metrics to `all_results.json` of the output folder, and print them, once."""
    if trainer.is_world_process_zero():
        trainer.save_metrics("all", metrics)
        print(json.dumps(metrics, indent=1))
