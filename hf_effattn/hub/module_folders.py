"""What sentence-transformers saves: a folder for each module, the transformers model in the root or below it."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, cached_file

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
ROUTER = "router_config.json"
# The Hub's name for the task of each class.
TASKS = {
    "SentenceTransformer": "sentence-similarity",
    "CrossEncoder": "text-ranking",
    "SparseEncoder": "feature-extraction",
    "MultiVectorEncoder": "feature-extraction",
}


def stored_json(source: str | Path, file: str) -> Any:
    """What a JSON file of a model says; None where it has none.

    Args:
        source (`str` or `Path`): Hub id or folder.
        file (`str`): its path in there.

    Raises:
        ValueError: it is no JSON.
        OSError: there is no such model.
    """
    path = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} of {source} is no JSON ({error})") from None


def saved_class(source: str | Path) -> str | None:
    """The class of sentence-transformers that saved a model; None where none did.

    Args:
        source (`str` or `Path`): Hub id or folder.
    """
    if stored_json(source, MODULES) is None:
        return None
    named = (stored_json(source, SETTINGS) or {}).get("model_type", "SentenceTransformer")
    return named if named in TASKS else "SentenceTransformer"


def module_folders(folder: Path) -> list[Path]:
    """The folders of the modules below the root, those within a Router among them.

    Args:
        folder (`Path`): that `save_pretrained` wrote.

    Raises:
        ValueError: a module that lies outside the folder.
    """
    return [folder / path for path in _module_paths(folder)]


def _module_paths(source: str | Path) -> list[str]:
    paths = [_inside(module["path"], MODULES, source) for module in stored_json(source, MODULES) or ()]
    for path in list(paths):
        router = stored_json(source, (path / ROUTER).as_posix()) or {"types": ()}
        paths += [path / _inside(name, ROUTER, source) for name in router["types"]]
    return list(dict.fromkeys(path.as_posix() for path in paths if path.parts))


def _inside(path: str, file: str, source: str | Path) -> PurePosixPath:
    folder = PurePosixPath(path)
    if folder.is_absolute() or ".." in folder.parts:
        raise ValueError(f"{file} of {source} names a module outside its folder: {path!r}")
    return folder


def config_in(source: str | Path) -> PreTrainedConfig | None:
    """The configuration of the transformers model that was saved, of several the first; None where there is none.

    Args:
        source (`str` or `Path`): Hub id or folder.
    """
    for path in ("", *_module_paths(source)):
        config = stored_json(source, (PurePosixPath(path) / CONFIG_NAME).as_posix())
        # Other modules have a config.json too, without a type.
        if config is not None and (not path or "model_type" in config):
            return AutoConfig.from_pretrained(source, subfolder=path)
    return None
