"""Folders of sentence-transformers: a folder for each module, the transformers model in the root or below it."""

import json
from pathlib import Path, PurePosixPath

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
# The Hub's name for the task of each class.
TASKS = {
    "SentenceTransformer": "sentence-similarity",
    "CrossEncoder": "text-ranking",
    "SparseEncoder": "feature-extraction",
    "MultiVectorEncoder": "feature-extraction",
}


def saved_class(folder: Path) -> str | None:
    """The class of sentence-transformers that saved a folder; None where none did."""
    if not (folder / MODULES).is_file():
        return None
    settings = folder / SETTINGS
    read = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    named = read.get("model_type", "SentenceTransformer")
    return named if named in TASKS else "SentenceTransformer"


def module_folders(folder: Path) -> list[Path]:
    """The folders of the modules below the root, those within a Router among them.

    Args:
        folder (`Path`): that `save_pretrained` wrote.

    Raises:
        ValueError: a module that lies outside the folder.
    """
    if not (folder / MODULES).is_file():
        return []
    found = []
    for module in json.loads((folder / MODULES).read_text(encoding="utf-8")):
        path = PurePosixPath(module["path"])
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{folder / MODULES} names a module outside its folder: {module['path']!r}")
        if path.parts:
            found.append(folder / path)
    routers = [one for one in (folder, *found) if (one / "router_config.json").is_file()]
    for router in routers:
        types = json.loads((router / "router_config.json").read_text(encoding="utf-8"))["types"]
        found += [router / name for name in types if (router / name).is_dir() and router in (router / name).parents]
    return list(dict.fromkeys(found))


def config_in(folder: Path) -> PreTrainedConfig | None:
    """The configuration of the transformers model in a folder, of several the first; None where it holds none."""
    for place in (folder, *module_folders(folder)):
        config = place / CONFIG_NAME
        # Other modules have a config.json too, without a type.
        if config.is_file() and (place == folder or "model_type" in json.loads(config.read_text(encoding="utf-8"))):
            return AutoConfig.from_pretrained(place)
    return None
