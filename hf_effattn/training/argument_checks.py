"""Mistakes on the command lines of the training scripts, told before anything is loaded, tokenized or trained."""

from collections.abc import Collection, Mapping

from transformers import TrainingArguments

import hf_effattn

from .command_line import NO_MODEL, ModelArguments


def check_model(arguments: ModelArguments) -> None:
    """That a model is named, and no option about it stays without effect.

    Raises:
        ValueError: neither a checkpoint nor a kind of model, settings without a method, or what a model from scratch
            has beside a checkpoint, or the other way.
    """
    if arguments.method_settings and arguments.method is None:
        methods = ", ".join(hf_effattn.list_methods())
        raise ValueError(
            f"--method_settings {arguments.method_settings} without a --method leave the attention as it is: name one"
            f" of {methods}"
        )
    named = arguments.model_name_or_path
    if named is None and arguments.model_type is None:
        raise ValueError(NO_MODEL)
    if named is None and differs(arguments, "model_revision"):
        raise ValueError("--model_revision is of a checkpoint: name it with --model_name_or_path")
    if named is not None and arguments.model_type is not None:
        raise ValueError(
            f"--model_type {arguments.model_type} is of a model from scratch, and {named} has a type of its own: leave"
            " out --model_type or --model_name_or_path"
        )
    owner = arguments.tokenizer_name or named
    if owner is not None and differs(arguments, "vocab_size"):
        raise ValueError(
            f"--vocab_size {arguments.vocab_size} is of a tokenizer that is trained, and that of {owner} is taken as"
            " it is: leave out --vocab_size, or --tokenizer_name and --model_name_or_path"
        )


def differs(arguments: ModelArguments, name: str) -> bool:
    """Whether an argument has another value than its default."""
    return bool(getattr(arguments, name) != getattr(ModelArguments(), name))


def works(training: TrainingArguments) -> bool:
    """Whether anything is asked for."""
    return bool(training.do_train or training.do_eval or training.do_predict)


def check_work(training: TrainingArguments, *, instead_of_predictions: str | None = None, more: str = "") -> None:
    """That anything is asked for, and nothing that the script does not do.

    Args:
        training (`TrainingArguments`): what is asked for.
        instead_of_predictions (`str`, *optional*): what to do where the script has no predictions of a test set.
        more (`str`): what else the script can be asked for, as the last of the options to choose from.

    Raises:
        ValueError: nothing to do, predictions where there are none, or a checkpoint to resume and no training.
    """
    if training.resume_from_checkpoint is not None and not training.do_train:
        raise ValueError(
            f"--resume_from_checkpoint {training.resume_from_checkpoint} goes on with a training, and there is no"
            " --do_train: add it, or name what was trained with --model_name_or_path"
        )
    if training.do_predict and instead_of_predictions is not None:
        raise ValueError(f"this script has no --do_predict: {instead_of_predictions}")
    if not works(training):
        predict = "" if instead_of_predictions is not None else ", --do_predict"
        raise ValueError(f"nothing to do: pass one or more of --do_train, --do_eval{predict}{more}")


def check_splits(
    splits: Collection[str],
    training: TrainingArguments,
    given_by: Mapping[str, str],
    *,
    data: str = "the data",
    validation: Collection[str] = ("validation",),
    test: Collection[str] = ("test",),
) -> None:
    """That there are data for all that is asked for.

    Args:
        splits (`Collection[str]`): the splits that there are.
        training (`TrainingArguments`): what is asked for; evaluations in the course of a training are too.
        given_by (`Mapping[str, str]`): the options that name each split.
        data (`str`): what the message calls the data.
        validation, test (`Collection[str]`): the splits to evaluate on, and those to predict.

    Raises:
        ValueError: a split is missing; the message says which, what needs it and how to name it.
    """
    strategy = training.eval_strategy.value
    evaluation = "--do_eval" if strategy == "no" else f"--eval_strategy {strategy}"
    wanted = (
        (training.do_train, "--do_train", ("train",)),
        (training.do_eval, evaluation, validation),
        (training.do_predict, "--do_predict", test),
    )
    for asked, option, names in wanted:
        missing = [name for name in names if name not in splits]
        if asked and missing:
            raise ValueError(
                f"{data} have no {' and no '.join(missing)}, which {option} needs (there are"
                f" {', '.join(splits) or 'none'}): name them with {' and '.join(given_by[name] for name in missing)}"
            )
