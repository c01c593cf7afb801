"""The tasks of the Long Range Arena that are made of existing data: Text (IMDb), Image (CIFAR-10), Retrieval (AAN).

Source: Tay et al. 2020 and the input pipelines that are published with it.
"""

import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from hf_effattn.data.hub_data import load_from_hub

from .checks import check_range

# Examples whose columns are a text, two texts, or pixels, with the number of the class.
Example = dict[str, Any]
Image = tuple[np.ndarray, int]
HELD_OUT = 10  # of the images to train on, one in so many is for validation
IMAGE_SIZE = 32
AAN_FILES = {"train": "train", "validation": "eval", "test": "test"}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMDB_CLASSES = ("neg", "pos")
OWN_FILES = "--data_path (in Python path=)"
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp")


@dataclass(frozen=True)
class TextSettings:
    """Settings of Text.

    Attributes:
        max_length: bytes of a text; longer ones are cut.
        validation_share: share of the training texts that are held out for validation, spread evenly. With the default
            0 validation is the test, as published: then it must not choose anything.
    """

    max_length: int = 4096
    validation_share: float = 0.0

    def __post_init__(self) -> None:
        check_range("max_length", self.max_length, 1)
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must be from 0 to below 1, got {self.validation_share}")


@dataclass(frozen=True)
class ImageSettings:
    """Image has no settings: one training image in ten is for validation, as published."""


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of Retrieval: `max_length` bytes of each text of a pair; longer ones are cut."""

    max_length: int = 4096

    def __post_init__(self) -> None:
        check_range("max_length", self.max_length, 1)


def cut(text: str, max_length: int) -> str:
    """The beginning of a text, at most so many bytes of UTF-8; a character that would be cut through is left out."""
    return text.encode()[:max_length].decode(errors="ignore")


def grey(colours: np.ndarray) -> np.ndarray:
    """Brightness, uint8 `(...)`, of red, green and blue, `(..., 3)` (Source: ITU-R BT.601, luma).

    Rounded in whole numbers, so that it is the same everywhere.
    """
    weighted = (colours.astype(np.int64) * (299, 587, 114)).sum(axis=-1)
    return ((weighted + 500) // 1000).astype(np.uint8)


def source_files(task: str, path: Path | None) -> dict[str, Path]:
    """The file or folder of each split of a task in the user's folder; none where the task comes from the Hub.

    Raises:
        FileNotFoundError: the folder does not hold what the task needs, or Retrieval was given none.
    """
    if path is None:
        if task == "retrieval":
            raise FileNotFoundError(
                "retrieval needs path=: a folder with new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and "
                "new_aan_pairs.test.tsv, each line label, id1, id2, text1 and text2 divided by tabs, no header. The "
                "Long Range Arena releases the pairs of ids (see google-research/long-range-arena, Document "
                "Retrieval; copies of lra_release have the whole files in tsv_data); the texts are those of the ACL "
                "Anthology Network corpus"
            )
        return {}
    names: dict[str, list[str]]
    if task == "retrieval":
        names = {split: [f"new_aan_pairs.{name}.tsv"] for split, name in AAN_FILES.items()}
    elif task == "text":
        names = {split: [f"{split}.jsonl", f"{split}.jsonl.gz"] for split in ("train", "test")}
    else:
        names = {split: [split, *(f"{split}.tar{end}" for end in ("", ".xz", ".gz"))] for split in ("train", "test")}
    files = {
        split: next((path / name for name in options if (path / name).exists()), None)
        for split, options in names.items()
    }
    missing = [" or ".join(names[split]) for split, file in files.items() if file is None]
    if missing:
        raise FileNotFoundError(f"{task} needs {', '.join(missing)} in the folder {str(path)!r}")
    return {split: file for split, file in files.items() if file is not None}


def _open_text(file: Path) -> TextIO:
    # A line ends at \n only: texts may hold other characters that end a line elsewhere.
    opener: Any = gzip.open if file.suffix == ".gz" else open
    opened: TextIO = opener(file, "rt", encoding="utf-8", newline="\n")
    return opened


def _class_number(label: Any, classes: tuple[str, ...], place: str) -> int:
    if label in classes:
        return classes.index(label)
    try:
        number = int(float(label))
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < len(classes) or number != float(label):
        raise ValueError(f"{place}: the label must be one of {', '.join(classes)} or its number, got {label!r}")
    return number


def text_examples(settings: TextSettings, files: dict[str, Path], split: str) -> Iterator[Example]:
    """Film reviews and whether they are good, as `text` and `label`.

    `files` are JSON lines with `text` and `label` (`neg` and `pos`, or 0 and 1) for `train` and `test`; none for the
    data set `stanfordnlp/imdb` of the Hub.

    Raises:
        ValueError: a line without text or with another label.
    """
    share = settings.validation_share
    source = "train" if split == "train" or (split == "validation" and share > 0) else "test"
    for number, row in enumerate(_text_rows(files, source)):
        held_out = int((number + 1) * share) > int(number * share)
        if source == "test" or held_out == (split == "validation"):
            place = f"{files.get(source, 'stanfordnlp/imdb')}, text {number + 1}"
            if not isinstance(row.get("text"), str):
                raise ValueError(f"{place}: no column 'text', only {', '.join(row)}")
            label = _class_number(row.get("label"), IMDB_CLASSES, place)
            yield {"text": cut(row["text"], settings.max_length), "label": label}


def _text_rows(files: dict[str, Path], split: str) -> Iterator[dict[str, Any]]:
    if files:
        with _open_text(files[split]) as lines:
            yield from (json.loads(line) for line in lines)
    else:
        yield from load_from_hub("stanfordnlp/imdb", split=split, instead=OWN_FILES)


def read_images(files: dict[str, Path], source: str) -> list[Image]:
    """Coloured images, uint8 `(32, 32, 3)`, and their class numbers, in an order that mixes the classes.

    `files` are for `train` and `test` a folder with a folder of images for each class, or a tar file of one; none for
    the data set `uoft-cs/cifar10` of the Hub.

    Raises:
        ValueError: no image is there, one has another size, or a folder is no class of CIFAR-10.
    """
    if files:
        images = _stored_images(files[source])
    else:
        rows = load_from_hub("uoft-cs/cifar10", split=source, instead=OWN_FILES)
        images = [(np.asarray(row["img"].convert("RGB")), row["label"]) for row in rows]
    for colours, _ in images:
        if colours.shape != (IMAGE_SIZE, IMAGE_SIZE, 3):
            raise ValueError(f"an image must have {IMAGE_SIZE} x {IMAGE_SIZE} pixels, got {colours.shape[:2]}")
    return images


def image_examples(images: list[Image], split: str) -> Iterator[Example]:
    """Grey images as `pixels` `(1024,)`, row by row, and `label`; validation is the last tenth of the training images.

    `images` are what `read_images` gives, of `"test"` for the test, else of `"train"`.
    """
    training = len(images) - len(images) // HELD_OUT
    chosen = {"train": images[:training], "validation": images[training:], "test": images}[split]
    for colours, label in chosen:
        yield {"pixels": grey(colours).ravel(), "label": label}


def image_files(folder: Path) -> list[Path]:
    """The images of a folder, in a folder for each class."""
    return sorted(file for file in folder.glob("*/*") if file.suffix.lower() in _IMAGE_ENDINGS)


def _stored_images(source: Path) -> list[Image]:
    """Images of a folder or tar file, by their place among their class, then by class."""
    import PIL.Image  # only for files; the images of the Hub come decoded

    def read(data: bytes) -> np.ndarray:
        with PIL.Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))

    images = []
    if source.is_dir():
        for file in image_files(source):
            images.append((file.name, file.parent.name, read(file.read_bytes())))
    else:
        with tarfile.open(source) as archive:
            for member in archive:
                name = Path(member.name)
                data = archive.extractfile(member) if name.suffix.lower() in _IMAGE_ENDINGS else None
                if data is not None:
                    images.append((name.name, name.parent.name, read(data.read())))
    if not images:
        raise ValueError(f"{source} holds no images; they are looked for in a folder for each class")
    # Not by their names alone: where these begin with the class, the last tenth would be of one class.
    images.sort(key=lambda image: image[:2])
    seen: Counter[str] = Counter()
    places = []
    for _, label, _ in images:
        places.append((seen[label], label))
        seen[label] += 1
    images = [image for _, image in sorted(zip(places, images, strict=True), key=lambda pair: pair[0])]
    return [(pixels, _class_number(label, CIFAR10_CLASSES, f"{source}/{label}")) for _, label, pixels in images]


def retrieval_examples(settings: RetrievalSettings, files: dict[str, Path], split: str) -> Iterator[Example]:
    """Pairs of papers and whether they are related, as `text1`, `text2` and `label`.

    A line that has not the five columns, or another label than 0 and 1, is a `ValueError`.
    """
    with _open_text(files[split]) as lines:
        for number, line in enumerate(lines):
            # No quotation: a mark that opens nothing must not swallow the lines after it.
            columns = line.rstrip("\r\n").split("\t")
            place = f"{files[split]}, line {number + 1}"
            if len(columns) != 5:
                raise ValueError(f"{place}: 5 columns divided by tabs are needed, got {len(columns)}")
            first, second = (cut(text, settings.max_length) for text in columns[3:])
            yield {"text1": first, "text2": second, "label": _class_number(columns[0], ("0", "1"), place)}
