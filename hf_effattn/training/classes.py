"""Which output of a classifier is which class: the order of its checkpoint, where that has names for them."""

from collections.abc import Sequence

from datasets import ClassLabel, DatasetDict
from transformers import AutoConfig, TrainingArguments

from .arguments import ModelArguments
from .run import checkpoint_to_resume

HEAD = "ForSequenceClassification"


def without_capitals(names: Sequence[str]) -> list[str]:
    """The names in small letters, or as they are where nothing but capitals tells two of them apart."""
    small = [name.casefold() for name in names]
    return small if len(set(small)) == len(small) else list(names)


def numbers_of(names: Sequence[str], among: Sequence[str]) -> list[int]:
    """Where each of the names stands among those of another list, whatever its capitals.

    Raises:
        ValueError: it stands nowhere.
    """
    others = without_capitals(among)
    return [others.index(name) for name in without_capitals(names)]


def class_order(
    names: Sequence[str], arguments: ModelArguments, training: TrainingArguments, fewer: bool = False
) -> list[str]:
    """The classes in the order of the model's outputs, as transformers' `run_glue.py` finds it.

    A classifier that is loaded and has names for its classes, the data's in any order, keeps its order and spelling.
    One that has numbers for names (`LABEL_0` or `0`), and a model without a head, take the order of the data.

    Args:
        names (`Sequence[str]`): the data's classes in their order.
        arguments (`ModelArguments`): which checkpoint, and whether a head with other classes is replaced in training.
        training (`TrainingArguments`): whether there is a training, and whether one is resumed, by whose weights.
        fewer (`bool`): whether the data may lack some of the head's classes, as a few texts to evaluate on may.

    Raises:
        ValueError: the head has other classes than the data.
    """
    resumed = checkpoint_to_resume(training)
    checkpoint, revision = (resumed, "main") if resumed else (arguments.model_name_or_path, arguments.model_revision)
    config = None if checkpoint is None else AutoConfig.from_pretrained(checkpoint, revision=revision)
    if config is None or not any(name.endswith(HEAD) for name in config.architectures or []):
        return list(names)
    saved = [str(config.id2label[number]) for number in range(config.num_labels)]
    unnamed = all(name in (f"LABEL_{number}", str(number)) for number, name in enumerate(saved))
    if unnamed and len(saved) == len(names):
        return list(names)
    known, wanted = set(without_capitals(saved)), set(without_capitals(names))
    if known == wanted or (fewer and wanted < known):
        return saved
    if training.do_train and arguments.ignore_mismatched_sizes:
        return list(names)
    advice = "name the data's classes as the checkpoint does"
    if training.do_train:
        advice += ", or pass --ignore_mismatched_sizes to train a head for them"
    raise ValueError(
        f"{checkpoint} has {len(saved)} classes, {', '.join(saved)}, the data have {len(names)}, {', '.join(names)}: "
        + advice
    )


def in_order(data: DatasetDict, outputs: Sequence[str]) -> DatasetDict:
    """The data with the numbers of the model's outputs in the column `label`; -1, which is no class, stays."""

    def renumber(rows: dict[str, list[int]], numbers: list[int]) -> dict[str, list[int]]:
        return {"label": [numbers[label] if label >= 0 else label for label in rows["label"]]}

    renumbered = {}
    for split, rows in data.items():
        renumbered[split] = rows
        if "label" in rows.features and rows.features["label"].names != list(outputs):
            features = rows.features.copy()
            features["label"] = ClassLabel(names=list(outputs))
            numbers = numbers_of(rows.features["label"].names, outputs)
            renumbered[split] = rows.map(renumber, fn_kwargs={"numbers": numbers}, batched=True, features=features)
    return DatasetDict(renumbered)
