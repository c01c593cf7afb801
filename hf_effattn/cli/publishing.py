"""`effattn card` and `effattn push`: the card of a model, and its way to the Hub."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import mistakes_in_words

RepoId = Annotated[str, typer.Argument(help="Such as me/roberta-base-i-clustered; made if it is missing.")]


def card(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a patched, converted or from-scratch model.")],
    output: Annotated[Path | None, typer.Option(help="File to write. Default: README.md in the folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the card that is there.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the card instead of writing it.")] = False,
    repo_id: Annotated[
        str | None, typer.Option(help="Where it will be on the Hub; the loading code names it.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder of `effattn report --output`: becomes the table of error and speed.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="all_results.json of a training script: becomes evaluation results.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Hub id of the data set that --results is about.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the pretrained model.")] = None,
    license: Annotated[str | None, typer.Option(help="Such as apache-2.0.")] = None,
    language: Annotated[str | None, typer.Option(help="Such as en.")] = None,
) -> None:
    """Write the model card: how to load the model, its settings, measurements and limits."""
    if results is not None and dataset is None:
        raise typer.BadParameter("--results needs --dataset, the Hub id of its data set, such as nyu-mll/glue")
    from huggingface_hub.constants import REPOCARD_NAME

    from ..hub import evaluations_of, model_card, task_of
    from ..hub.loading import check_source
    from ..hub.module_folders import config_in, saved_class
    from ..reporting import Report
    from ..reporting.report import FILE_NAME

    with mistakes_in_words():
        if output is None and not show:
            if not Path(model).is_dir():
                raise ValueError(f"{model} is no folder here: say with --output where to write its card, or --show it")
            output = Path(model) / REPOCARD_NAME
        if output is not None and output.is_dir():
            raise ValueError(f"--output: {output} is a folder; name a file, such as {output / REPOCARD_NAME}")
        if output is not None and output.exists() and not (overwrite or show):
            raise ValueError(f"{output} is there already: name another file with --output, or --overwrite it")
        if report is not None and not (report / FILE_NAME).is_file():
            raise ValueError(f"--report: {report} has no {FILE_NAME}: name the folder of effattn report --output")
        check_source(model)
        config = config_in(model)
        if config is None:
            raise ValueError(
                f"{model} has no config.json of a transformers model, so there is nothing to write a card of"
            )
        evaluations = []
        if results is not None and dataset is not None:
            values = _read_results(results)
            evaluations = evaluations_of(values, task=task_of(config) or "other", dataset=dataset)
        text = model_card(
            config,
            repo_id=repo_id or (None if Path(model).is_dir() else model),
            base_model=base_model,
            license=license,
            language=language,
            report=None if report is None else Report.load(report),
            evaluations=evaluations,
            datasets=None if dataset is None else [dataset],
            loaded_by=saved_class(model),
        )
        if output is None or show:
            typer.echo(str(text))
        else:
            text.save(output)
            typer.echo(f"written: {output}")


def _read_results(file: Path) -> Any:
    """The values in a training script's `all_results.json`."""
    if not file.is_file():
        raise ValueError(f"--results: there is no file {file}; a training script writes all_results.json at its end")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--results: {file} is not JSON ({error}): give a training's all_results.json") from None


def push(
    folder: Annotated[Path, typer.Argument(help="Folder that `effattn convert` or save_pretrained wrote.")],
    repo_id: RepoId,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository. Default: the Hub's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
) -> None:
    """Push a saved model to the Hub with its card; log in once with `hf auth login`.

    A folder without README.md gets a card of its configuration; `effattn card` writes a fuller one first. Pickles,
    checkpoints of a training and folders are not pushed.
    """
    from ..hub import push_folder

    with mistakes_in_words():
        pushed = push_folder(
            folder, repo_id, private=private, revision=revision, create_pr=create_pr, commit_message=message
        )
        typer.echo(f"pushed: {pushed.pr_url or pushed.repo_url}")
