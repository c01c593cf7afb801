"""Pushing models with their cards to the Hub. Tokens stay with `huggingface_hub`: nothing here reads or keeps one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from ..patching.sentence_transformers import is_sentence_transformer, models_inside
from .card import loaded_from, model_card
from .module_folders import config_in, module_folders, saved_class

# What save_pretrained of models and tokenizers writes, and the card with its pictures. Checkpoints of a training,
# pickles (`training_args.bin`, `optimizer.pt`) and folders stay here.
PUSHED = (
    "*.safetensors",
    "*.json",
    *("*.txt", "*.model", "*.codes", "*.spm", "*.tokenizer"),  # what tokenizers name their vocabularies
    "*.jinja",
    "*.png",
    REPOCARD_NAME,
)
ADAPTER_CONFIG = "adapter_config.json"  # what PEFT writes instead of a model
PULL_REQUESTS = "refs/pr/"

# What the HTTP library of huggingface_hub raises without a connection; which library that is depends on the version.
CONNECTION_ERRORS: tuple[type[Exception], ...] = HfHubHTTPError.__bases__
REFUSED = (401, 403)


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: ModelCard | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    max_shard_size: str | int | None = None,
) -> CommitInfo:
    """Push a patched, converted or from-scratch model, its tokenizer and its card, in one commit.

    The model's own `push_to_hub` works too; transformers then writes a card that does not say how to load it.

    Args:
        model (`PreTrainedModel`): as `model.save_pretrained` takes it; weights are written as safetensors. Or a
            `SentenceTransformer`, `CrossEncoder` or `SparseEncoder`, with all its modules and its own tokenizer.
        repo_id (`str`): such as `"me/roberta-base-i-clustered"`; the repository is made if it is missing.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): pushed with it.
        card (`ModelCard`, *optional*): from `hf_effattn.model_card`. Default: the one that the repository has, or a
            new one of the model's configuration.
        private (`bool`, *optional*): of a new repository.
        token (`str` or `bool`, *optional*): as everywhere in `huggingface_hub`. Default: the one of `hf auth login`.
        revision (`str`, *optional*): the branch, made if it is missing, or a pull request's. Default: the main one.
        create_pr (`bool`): open a pull request instead.
        commit_message (`str`, *optional*): of the commit.
        max_shard_size (`str` or `int`, *optional*): as of `save_pretrained`.

    Returns:
        `huggingface_hub.CommitInfo`: with the commit's address and id.

    Raises:
        ValueError: `tokenizer` or `max_shard_size` for a model of sentence-transformers, which saves neither so.
        PermissionError: no token, or one that may not write there.
        OSError: the Hub refuses for another reason, or cannot be reached.
    """
    with_modules = is_sentence_transformer(model)
    if with_modules:
        models_inside(model)  # raises where it has none
        if tokenizer is not None or max_shard_size is not None:
            raise ValueError(
                f"{type(model).__name__} saves its own tokenizer, and its weights in one file: leave out "
                f"{'tokenizer' if tokenizer is not None else 'max_shard_size'}"
            )
    with TemporaryDirectory() as folder:
        options = {"create_model_card": False} if with_modules else {"max_shard_size": max_shard_size}
        model.save_pretrained(folder, **{name: value for name, value in options.items() if value is not None})
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if card is not None:
            card.save(Path(folder) / REPOCARD_NAME)
        return push_folder(
            folder,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> CommitInfo:
    """Push a folder that `save_pretrained` wrote, in one commit.

    Its `README.md` is the card, whose loading code gets the name of the repository; where it has none, the one that
    the repository has stays, and a repository without one gets a card of the model's configuration. Weights of an
    earlier push that the folder has not are deleted there. Pickles, checkpoints of a training and folders are not
    pushed, except those of the modules of a model of sentence-transformers.

    Args:
        folder (`str` or `Path`): with `config.json` and weights as safetensors.
        repo_id (`str`): such as `"me/roberta-base-i-clustered"`; the repository is made if it is missing.
        private, token, revision, create_pr, commit_message: as of `push_to_hub`.

    Returns:
        `huggingface_hub.CommitInfo`: with the commit's address and id.

    Raises:
        ValueError: the folder holds no model, only an adapter of one, or none as safetensors.
        PermissionError: no token, or one that may not write there.
        OSError: the Hub refuses for another reason, or cannot be reached.
    """
    folder = Path(folder)
    if not (folder / CONFIG_NAME).is_file() and (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG_NAME}, but {ADAPTER_CONFIG}: it is an adapter of PEFT without its model. Save "
            "what model.merge_and_unload() returns and push that, or push the adapter with PEFT's own push_to_hub"
        )
    config = config_in(folder)
    if config is None:
        raise ValueError(f"{folder} has no {CONFIG_NAME}: name a folder that save_pretrained wrote")
    places = (folder, *module_folders(folder))
    if not any(path for place in places for path in place.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no weights as safetensors, and other files are not pushed: load the model and save it anew "
            "with save_pretrained"
        )
    api = HfApi(token=token)
    with _refusals_in_words(api.endpoint):
        # The full name, with the owner that the Hub adds.
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr and not revision.startswith(PULL_REQUESTS):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        files = (path for place in places for pattern in PUSHED for path in place.glob(pattern) if path.is_file())
        paths = {path.relative_to(folder).as_posix(): path for path in sorted(files)}
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, path) for name, path in paths.items() if name != REPOCARD_NAME
        ]
        here = set(paths)
        there = set(api.list_repo_files(repo_id, revision=revision))
        # Weights of an earlier push in another number of files: loading would take them for these.
        stale = {path for path in there - here if path.endswith((".safetensors", SAFE_WEIGHTS_INDEX_NAME))}
        ours = {"" if place == folder else f"{place.relative_to(folder).as_posix()}/" for place in places}
        operations += [CommitOperationDelete(path) for path in sorted(stale) if path[: path.rfind("/") + 1] in ours]
        card = None
        if REPOCARD_NAME in here:
            card = loaded_from((folder / REPOCARD_NAME).read_text(encoding="utf-8"), repo_id)
        elif REPOCARD_NAME not in there:
            card = str(model_card(config, repo_id=repo_id, loaded_by=saved_class(folder)))
        if card is not None:
            operations.append(CommitOperationAdd(REPOCARD_NAME, card.encode()))
        return api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message or "Upload a model with its card by hf_effattn",
            revision=revision,
            create_pr=create_pr,
        )


@contextmanager
def _refusals_in_words(endpoint: str) -> Iterator[None]:
    """Say what to do where a token is missing or there is no connection."""
    try:
        yield
    except CONNECTION_ERRORS as error:
        response = getattr(error, "response", None)
        if response is not None and response.status_code in REFUSED:
            raise PermissionError(
                f"{endpoint} does not let you write there: log in with `hf auth login`, or set HF_TOKEN, with a token "
                f"that may write ({error})"
            ) from error
        if isinstance(error, OSError):
            raise
        raise ConnectionError(f"{endpoint} cannot be reached: {error}") from error
