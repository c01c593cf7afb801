"""Command lines of training scripts: the arguments, their help, and mistakes told before any work starts."""

from argparse import Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from transformers import HfArgumentParser, TrainingArguments, set_seed

from ..hub.loading import check_source

NO_MODEL = "no model: name a checkpoint with --model_name_or_path, or a kind with --model_type"


@dataclass
class ModelArguments:
    """Which model and tokenizer, and whether a method replaces the model's attention."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint to start from: a folder, or a name on the Hub, where the token of HF_TOKEN opens what"
            " is private or gated."
        },
    )
    model_revision: str = field(default="main", metadata={"help": "Its branch, tag or commit on the Hub."})
    model_type: str | None = field(
        default=None, metadata={"help": "Kind of model from scratch: bert, gpt2, cst, clusterformer, ..."}
    )
    config_overrides: str = field(
        default="",
        metadata={"help": "Settings of the model's configuration, a checkpoint's too, as JSON or name=value,..."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer, where it is not the model's; `bytes` for one token per byte."}
    )
    vocab_size: int = field(default=6000, metadata={"help": "Size of the BPE that is trained where none is named."})
    method: str | None = field(
        default=None,
        metadata={"help": 'Method that replaces the attention, such as "i-clustered clusters=25 topk=32".'},
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Train a new head on a checkpoint whose head has another number of classes."}
    )
    save_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Number type of the weights once trained, for a smaller file.",
            "choices": ["bfloat16", "float16", "float32"],
        },
    )


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and names defaults where there is one; each option by one of its names."""

    def _get_help_string(self, action: Action) -> str | None:
        if action.required:
            return f"{action.help or ''} (required)".lstrip()
        return action.help if action.default in (None, "", []) else super()._get_help_string(action)

    def _format_action_invocation(self, action: Action) -> str:
        with_hyphens = {name.replace("_", "-") for name in action.option_strings if "_" in name}
        shown = copy(action)
        shown.option_strings = [name for name in action.option_strings if name not in with_hyphens]
        return super()._format_action_invocation(shown)


def parser_of(
    description: str | None,
    data: type,
    training: type = TrainingArguments,
    *,
    model: type = ModelArguments,
    **more: type,
) -> HfArgumentParser:
    """The parser of a training script, with a group of options for each kind of arguments, the script's own first.

    What it parses begins with `model`, goes on with `data` and `more`, and ends with `training`.

    Args:
        description (`str`, *optional*): what the script does, with examples: its `__doc__`.
        data (`type`): dataclass of the data's arguments.
        training (`type`): `TrainingArguments`, or those made of them.
        model (`type`): dataclass of the model's arguments.
        more (`type`): other dataclasses, by the titles of their groups.
    """
    kinds = {"model": model, "data": data, **more, f"training (transformers' {training.__name__})": training}
    # HfArgumentParser takes a group's title from the class, and transformers' classes are not ours to change.
    titled = [type(kind.__name__, (kind,), {"_argument_group_name": title}) for title, kind in kinds.items()]
    parser = HfArgumentParser(titled, description=description, formatter_class=HelpFormatter)
    parser.dataclass_types = list(kinds.values())
    for action in parser._actions:
        action.required |= action.dest == "output_dir"  # transformers would fill a folder of its own choice
    required = [f"--{action.dest} {action.dest.upper()}" for action in parser._actions if action.required]
    parser.usage = " ".join(["%(prog)s", *required, "[options]"])
    return parser


def parsed_arguments(
    description: str | None,
    command_line: list[str] | None,
    data: type,
    training: type = TrainingArguments,
    *,
    model: type = ModelArguments,
    instead_of_predictions: str | None = None,
    **more: type,
) -> tuple[Any, ...]:
    """What `parser_of` parses, once `check_work` and `check_model` have nothing against it; the seed is set.

    A script with another dataclass for `model` checks what that says.
    """
    parser = parser_of(description, data, training, model=model, **more)
    parsed: tuple[Any, ...] = parser.parse_args_into_dataclasses(command_line)
    check_work(parsed[-1], instead_of_predictions=instead_of_predictions)
    if model is ModelArguments:
        check_model(parsed[0])
    set_seed(parsed[-1].seed)
    return parsed


def check_model(arguments: ModelArguments) -> None:
    """That a model is named, and no option about it stays without effect.

    Raises:
        ValueError: neither a checkpoint nor a kind of model, a checkpoint that is no model's folder and no Hub id,
            or what a model from scratch has beside a checkpoint, or the other way.
    """
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
    if named is not None:
        check_source(named)


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
    for is_wanted, option, names in wanted:
        missing = [name for name in names if name not in splits]
        if is_wanted and missing:
            raise ValueError(
                f"{data} have no {' and no '.join(missing)}, which {option} needs (there are"
                f" {', '.join(splits) or 'none'}): name them with {' and '.join(given_by[name] for name in missing)}"
            )
