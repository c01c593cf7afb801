"""Command lines of the scripts: which model and data they name, what help says, how settings are written."""

import json
from argparse import Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import typer
from transformers import HfArgumentParser, TrainingArguments

from ..cli.arguments import value_of

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
    method: str | None = field(default=None, metadata={"help": "Method that replaces the attention: i-clustered, ..."})
    method_settings: str = field(default="", metadata={"help": "Its settings, as JSON or name=value,..."})
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


def check_one_source(arguments: Any, *sources: Sequence[str]) -> None:
    """That data are named in one way: of two, one would be left out without a word.

    Args:
        arguments (`Any`): dataclass of the data's arguments.
        sources (`Sequence[str]`): the options of each way.

    Raises:
        ValueError: options of more than one way are set.
    """
    named = [[f"--{name}" for name in names if getattr(arguments, name)] for names in sources]
    if sum(map(bool, named)) > 1:
        ways = "; or ".join(", ".join(f"--{name}" for name in names) for names in sources)
        raise ValueError(
            f"{' and '.join(name for names in named for name in names)} name data in more than one way: leave out all"
            f" but one of {ways}"
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
    description: str | None, data: type, training: type = TrainingArguments, **more: type
) -> HfArgumentParser:
    """The parser of a training script, with a group of options for each kind of arguments, the script's own first.

    What it parses begins with `ModelArguments`, goes on with `data` and `more`, and ends with `training`.

    Args:
        description (`str`, *optional*): what the script does, with examples: its `__doc__`.
        data (`type`): dataclass of the data's arguments.
        training (`type`): `TrainingArguments`, or those made of them.
        more (`type`): other dataclasses, by the titles of their groups.
    """
    kinds = {"model": ModelArguments, "data": data, **more, f"training (transformers' {training.__name__})": training}
    # HfArgumentParser takes a group's title from the class, and transformers' classes are not ours to change.
    titled = [type(kind.__name__, (kind,), {"_argument_group_name": title}) for title, kind in kinds.items()]
    parser = HfArgumentParser(titled, description=description, formatter_class=HelpFormatter)
    parser.dataclass_types = list(kinds.values())
    for action in parser._actions:
        action.required |= action.dest == "output_dir"  # transformers would fill a folder of its own choice
    required = [f"--{action.dest} {action.dest.upper()}" for action in parser._actions if action.required]
    parser.usage = " ".join(["%(prog)s", *required, "[options]"])
    return parser


def run_with_help(main: Callable[..., None], description: str | None) -> None:
    """Call `main` as `typer.run` does, with a help that has the script's `__doc__`, its examples line by line."""
    paragraphs = (description or "").split("\n\n")
    # Behind one line alone an example is not indented: the formatter takes that from a docstring's later lines.
    examples = (" ", "python ")
    kept = ["\b\n" + paragraph if paragraph.startswith(examples) else paragraph for paragraph in paragraphs]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help="\n\n".join(kept))(main)
    app()


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from a command line: a JSON object, or `name=value,name=value` with JSON values or plain words."""
    if text.lstrip().startswith("{"):
        settings: dict[str, Any] = json.loads(text)
        return settings
    settings = {}
    for pair in filter(None, text.split(",")):
        name, separator, value = pair.partition("=")
        if not separator:
            raise ValueError(f"settings are written name=value,name=value or as JSON, got {pair!r}")
        settings[name.strip()] = value_of(value)
    return settings


def command_line_of(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by name as a script takes them."""
    return [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
