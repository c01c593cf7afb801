"""The Long Range Arena as data sets of `datasets`, cached on disk: ListOps, Text, Retrieval, Image, Pathfinder.

    from scripts.lra import load_lra
    data = load_lra("listops")                      # 96,000 / 2,000 / 2,000 expressions, made once
    data = load_lra("pathfinder", num_proc=2)       # 160,000 / 20,000 / 20,000 images of 32 x 32 pixels
    data = load_lra("text")                         # IMDb from the Hub; path= for files of your own
    data = load_lra("retrieval", path="lra_release/tsv_data")

Source: Tay et al. 2020. Its files of ListOps and Pathfinder, made by a generator without a seed, are no longer offered
for download; what is made here follows the same description and is the same for everyone.
"""

import hashlib
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from itertools import count, islice
from os import PathLike
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError

from . import listops, pathfinder, sources
from .checks import check_range
from .random_streams import SPLITS

SETTINGS: dict[str, type] = {
    "listops": listops.ListOpsSettings,
    "text": sources.TextSettings,
    "retrieval": sources.RetrievalSettings,
    "image": sources.ImageSettings,
    "pathfinder": pathfinder.PathfinderSettings,
}
TASKS = tuple(SETTINGS)
GENERATED = ("listops", "pathfinder")
PIXELS = 1024
_TABLE_ROWS = 500
_FRUITLESS_CHUNKS = 20
_CLASSES: dict[str, tuple[str, ...]] = {
    "listops": listops.DIGITS,
    "text": sources.IMDB_CLASSES,
    "retrieval": ("unrelated", "related"),
    "image": sources.CIFAR10_CLASSES,
    "pathfinder": ("apart", "joined"),
}
_TEXT_COLUMNS = {"listops": ["text"], "text": ["text"], "retrieval": ["text1", "text2"]}


def lra_features(task: str) -> datasets.Features:
    """The columns of a task: `label`, and `text` (ListOps, Text), `text1` and `text2` (Retrieval) or `pixels`.

    Pixels, of Image and Pathfinder, are 1,024 numbers from 0 to 255, row by row.
    """
    columns: dict[str, Any] = {name: datasets.Value("string") for name in _TEXT_COLUMNS.get(task, [])}
    if not columns:
        columns["pixels"] = datasets.Sequence(datasets.Value("uint8"), length=PIXELS)
    return datasets.Features(columns | {"label": datasets.ClassLabel(names=list(_CLASSES[task]))})


def lra_settings(task: str, settings: dict[str, Any]) -> Any:
    """The checked settings of a task, from those that differ from the published ones.

    Raises:
        ValueError: another task, a setting that the task does not have, or a value out of its range.
        TypeError: a value that is not a whole number where one is needed.
    """
    if task not in SETTINGS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    known = [field.name for field in fields(SETTINGS[task])]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ValueError(f"{task} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(known) or 'none'}")
    return SETTINGS[task](**settings)


class LongRangeArena(datasets.ArrowBasedBuilder):
    """Builds a task's data set; `load_lra` is the way to use it."""

    VERSION = datasets.Version("1.0.0")  # of what the generators yield: another one builds anew

    def __init__(
        self, task: str, settings: Any, files: dict[str, Path], num_proc: int, cache_dir: str | None = None
    ) -> None:
        self.task, self.settings, self.files, self.num_proc = task, settings, files, num_proc
        self._seen: set[bytes] = set()
        self._images: dict[str, list[sources.Image]] = {}
        key: list[Any] = [asdict(settings)]
        for split, file in sorted(files.items()):
            state = file.stat()
            key.append([split, str(file.resolve()), state.st_size, state.st_mtime_ns])
            if file.is_dir():  # which says nothing of what is in the folders of its classes
                for image in sources.image_files(file):
                    state = image.stat()
                    key.append([str(image.relative_to(file)), state.st_size, state.st_mtime_ns])
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        super().__init__(
            cache_dir=cache_dir, dataset_name="long_range_arena", config_name=task, config_id=f"{task}-{digest[:16]}"
        )

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=lra_features(self.task))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        splits = [datasets.SplitGenerator(name=split, gen_kwargs={"split": split}) for split in SPLITS]
        if self.task in GENERATED:
            for generator in splits:
                generator.split_info.num_examples = self.settings.sizes[generator.name]  # for the progress bar
        return splits

    def _generate_tables(self, split: str) -> Iterator[tuple[int, pa.Table]]:
        if self.task == "listops":
            tables = self._listops_tables(split)
        elif self.task == "pathfinder":
            tables = self._pathfinder_tables(split)
        else:
            tables = self._source_tables(split)
        yield from enumerate(tables)

    def _chunks(self, generate: Any, split: str, planned: int) -> Iterator[Any]:
        """The chunks of a split in order: those that are planned by all processes, any further ones by this one."""
        make = partial(generate, self.settings, split)
        workers = min(self.num_proc, planned)
        with multiprocessing.Pool(workers) if workers > 1 else nullcontext() as pool:
            yield from map(make, range(planned)) if pool is None else pool.imap(make, range(planned))
        yield from map(make, count(planned))

    def _listops_tables(self, split: str) -> Iterator[pa.Table]:
        """Expressions, none of which came before in any split."""
        size = self.settings.sizes[split]
        missing, fruitless = size, 0
        for texts, values in self._chunks(listops.generate_listops, split, -(-size // listops.CHUNK)):
            new = []
            for number, text in enumerate(texts):
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest not in self._seen:
                    self._seen.add(digest)
                    new.append(number)
                if len(new) == missing:
                    break
            fruitless = 0 if new else fruitless + 1
            if fruitless == _FRUITLESS_CHUNKS:
                raise ValueError(
                    f"after {len(self._seen):,} different expressions {split} lacks {missing:,} of {size:,}, and no "
                    "more are found: make it smaller, or widen the lengths, max_depth or max_args"
                )
            missing -= len(new)
            if new:
                yield pa.table({"text": pa.array([texts[number] for number in new]), "label": values[new]})
            if not missing:
                return

    def _pathfinder_tables(self, split: str) -> Iterator[pa.Table]:
        size = self.settings.sizes[split]
        planned = -(-size // pathfinder.CHUNK)
        for number, images in enumerate(islice(self._chunks(pathfinder.generate_pathfinder, split, planned), planned)):
            kept = min(pathfinder.CHUNK, size - number * pathfinder.CHUNK)
            yield _pixel_table(images.pixels[:kept], images.labels[:kept])

    def _source_tables(self, split: str) -> Iterator[pa.Table]:
        if self.task == "text":
            examples = sources.text_examples(self.settings, self.files, split)
        elif self.task == "retrieval":
            examples = sources.retrieval_examples(self.settings, self.files, split)
        else:
            source = "test" if split == "test" else "train"
            if source not in self._images:
                self._images = {source: sources.read_images(self.files, source)}  # train is for two splits
            examples = sources.image_examples(self._images[source], split)
        while rows := list(islice(examples, _TABLE_ROWS)):
            if self.task == "image":
                yield _pixel_table(np.stack([row["pixels"] for row in rows]), np.array([row["label"] for row in rows]))
            else:
                yield pa.Table.from_pylist(rows)


def _pixel_table(pixels: np.ndarray, labels: np.ndarray) -> pa.Table:
    flat = pa.array(pixels.ravel(), type=pa.uint8())
    return pa.table({"pixels": pa.FixedSizeListArray.from_arrays(flat, PIXELS), "label": labels})


def load_lra(
    task: str,
    path: str | PathLike[str] | None = None,
    *,
    cache_dir: str | PathLike[str] | None = None,
    num_proc: int = 1,
    **settings: Any,
) -> datasets.DatasetDict:
    """A task of the Long Range Arena, made on the first call and read from the cache on later ones.

    Nothing half made is ever read: the files get their place when all splits are done, and a call that is interrupted
    begins anew.

    Args:
        task (`str`): `"listops"`, `"text"`, `"retrieval"`, `"image"` or `"pathfinder"`.
        path (`str` or `PathLike`, *optional*): the user's folder. For Text `train.jsonl` and `test.jsonl` (`.gz` too)
            with `text` and `label`, else IMDb from the Hub; for Image `train` and `test`, folders or tar files with a
            folder of images for each class of CIFAR-10, else CIFAR-10 from the Hub; for Retrieval, which needs it,
            `new_aan_pairs.train.tsv`, `.eval.tsv` and `.test.tsv` of the Long Range Arena release.
        cache_dir (`str` or `PathLike`, *optional*): default that of `datasets`.
        num_proc (`int`): processes that generate ListOps or Pathfinder; the result does not depend on it.
        settings: of the task, such as `train_size`, `max_length` or `seed`; the defaults are the published ones (see
            `ListOpsSettings`, `TextSettings`, `RetrievalSettings` and `PathfinderSettings`).

    Returns: `datasets.DatasetDict` with `train`, `validation` and `test`, and the columns of `lra_features`.

    Raises:
        ValueError: a task or setting that does not exist, a value out of its range, or a file with other contents.
        TypeError: a setting of the wrong type.
        FileNotFoundError: a file that is not there; the message says where to get it.
    """
    checked = lra_settings(task, settings)
    check_range("num_proc", num_proc, 1)
    if task in GENERATED:
        if path is not None:
            raise ValueError(f"{task} is generated and takes no path, got {str(path)!r}")
        files = {}
    else:
        files = sources.source_files(task, None if path is None else Path(path))
    builder = LongRangeArena(task, checked, files, num_proc, None if cache_dir is None else str(cache_dir))
    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:
        # What is wrong with the data, or with reaching the Hub, says more than that something went wrong.
        raise error.__cause__ or error from None
    data: datasets.DatasetDict = builder.as_dataset()
    return data
