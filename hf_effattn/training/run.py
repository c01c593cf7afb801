"""The run itself: which data it takes, how it trains and resumes, and what is kept of it."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from ..models.clusterformer import log_clustering

METRICS = Path(__file__).parent / "metrics"


def training_split(data: DatasetDict) -> Dataset:
    """The split that a tokenizer is made of: the one to train on, or where there is none the first."""
    return data.get("train", data[next(iter(data))])


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
        predictions = trainer.predict(test)
        metrics |= predictions.metrics
        if keep_classes is not None and trainer.is_world_process_zero():
            keep_classes(np.argmax(first_logits(predictions), axis=1))
    keep_metrics(trainer, metrics)
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


def checkpoint_to_resume(training: TrainingArguments) -> str | None:
    """The checkpoint that the arguments name; for `last` the newest whole one of the output folder, or None."""
    resume: str | None = training.resume_from_checkpoint
    if resume != "last":
        return resume
    folders = sorted(Path(training.output_dir).glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1]))
    return next((str(path) for path in folders if is_whole(path)), None)


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
    planned = training.max_steps if by_steps else training.num_train_epochs
    done = state["global_step"] if by_steps else state["epoch"]
    if done > planned:
        unit = "steps" if by_steps else "epochs"
        raise ValueError(
            f"{checkpoint} has had {done:g} {unit}, more than the {planned:g} asked for: name another --output_dir, or"
            " leave out --resume_from_checkpoint"
        )
    # Trainer counts epochs by whole steps, so the last may end a little before a whole number.
    same = by_steps or state["num_train_epochs"] >= training.num_train_epochs
    return bool(same and state["global_step"] >= (planned if by_steps else state["max_steps"]))


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


def load_metric(name: str, config_name: str | None = None) -> Any:
    """A metric that lies in the repository, by `evaluate`: no Hub is needed, the keys are the Hub's."""
    return evaluate.load(str(METRICS / name), config_name)


def accuracy() -> Callable[[EvalPrediction], dict[str, float]]:
    """Share of examples whose likeliest class is theirs, as `Trainer` calls it."""
    metric = load_metric("accuracy")

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        classes = np.argmax(first_logits(prediction), axis=1)
        return metric.compute(predictions=classes, references=prediction.label_ids)

    return compute


def first_logits(prediction: EvalPrediction) -> np.ndarray:
    """The logits `(examples, classes)`, which stand first where a model returns more."""
    logits = prediction.predictions
    return logits[0] if isinstance(logits, tuple) else logits


def write_predictions(path: Path, predictions: Iterable[tuple[int, Any]]) -> None:
    """A file as GLUE's server takes it: a line for each example, with its number from 0."""
    with path.open("w", encoding="utf-8") as file:
        file.write("index\tprediction\n")
        file.writelines(f"{index}\t{value}\n" for index, value in predictions)


def keep_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Write the metrics to `all_results.json` of the output folder, and show them as transformers does, once."""
    trainer.save_metrics("all", metrics)
    trainer.log_metrics("all", metrics)
