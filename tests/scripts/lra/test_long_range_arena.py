"""The five tasks as data sets: made once, the same for everyone, with errors that come before anything is written."""

import gzip
import io
import json
import os
import tarfile

import datasets
import numpy as np
import PIL.Image
import pytest
import torch

from hf_effattn.data import hub_data
from scripts.lra import (
    TASKS,
    LRACollator,
    listops,
    load_lra,
    lra_checksum,
    lra_tokenizer,
    pathfinder,
    sources,
    verify_lra,
)
from scripts.lra.checksums import CHECKSUMS, PREFIX
from scripts.lra.random_streams import SPLITS

SMALL = {"train_size": 700, "validation_size": 20, "test_size": 30}
SHORT = SMALL | {"min_length": 5, "max_length": 40}


def never(*arguments):
    raise AssertionError("generated although it is cached")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_the_beginning_of_the_default_output(task):
    """The first samples of every split, by the checksums that were taken from the whole default output."""
    module = {"listops": listops, "pathfinder": pathfinder}[task]
    settings = {"listops": listops.ListOpsSettings, "pathfinder": pathfinder.PathfinderSettings}[task]()
    for split in SPLITS:
        if task == "listops":
            texts, labels = module.generate_listops(settings, split, 0)
            columns = {"text": texts[:PREFIX]}
        else:
            images = module.generate_pathfinder(settings, split, 0)
            labels, columns = images.labels, {"pixels": images.pixels[:PREFIX]}
        data = datasets.Dataset.from_dict(columns | {"label": labels[:PREFIX]})
        if task == "pathfinder":
            data = data.cast_column("pixels", datasets.Sequence(datasets.Value("uint8"), length=1024))
        assert lra_checksum(data) == CHECKSUMS[task][split][1]


@pytest.mark.slow_except("listops-*")
@pytest.mark.parametrize(("task", "settings"), [("listops", SHORT), ("pathfinder", SMALL | {"contour_length": 4})])
def test_made_once_and_alike_with_any_number_of_processes(task, settings, tmp_path, monkeypatch):
    data = load_lra(task, cache_dir=tmp_path / "one", **settings)
    assert {split: len(rows) for split, rows in data.items()} == {"train": 700, "validation": 20, "test": 30}
    again = load_lra(task, cache_dir=tmp_path / "two", num_proc=2, **settings)
    sums = {split: lra_checksum(rows) for split, rows in data.items()}
    assert sums == {split: lra_checksum(rows) for split, rows in again.items()}
    assert len(set(sums.values())) == 3
    monkeypatch.setattr(listops, "generate_listops", never)
    monkeypatch.setattr(pathfinder, "generate_pathfinder", never)
    cached = load_lra(task, cache_dir=tmp_path / "one", num_proc=2, **settings)
    assert sums == {split: lra_checksum(rows) for split, rows in cached.items()}
    with pytest.raises(AssertionError, match="although it is cached"):
        load_lra(task, cache_dir=tmp_path / "one", **settings | {"seed": 1})


def test_expressions_are_unique_across_the_splits(tmp_path):
    """Of a single digit there are ten: they are shared out, and an eleventh cannot be had."""
    digits = {"max_depth": 1, "min_length": 0, "max_length": 2, "validation_size": 2, "test_size": 2}
    data = load_lra("listops", cache_dir=tmp_path, train_size=6, **digits)
    assert sorted(text for rows in data.values() for text in rows["text"]) == list("0123456789")
    with pytest.raises(ValueError, match=r"after 10 different expressions test lacks 1 of 2"):
        load_lra("listops", cache_dir=tmp_path, train_size=7, **digits)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("no space left")])
def test_an_interrupted_call_leaves_nothing_half_made(stop, tmp_path, monkeypatch):
    make, made = listops.generate_listops, []

    def stopping(*arguments):
        made.append(arguments)
        if len(made) == 2:
            raise stop
        return make(*arguments)

    monkeypatch.setattr(listops, "generate_listops", stopping)
    with pytest.raises(stop if isinstance(stop, type) else OSError):
        load_lra("listops", cache_dir=tmp_path, **SHORT)
    assert not list(tmp_path.rglob("*.arrow"))
    assert len(load_lra("listops", cache_dir=tmp_path, **SHORT)["train"]) == 700


def test_checksums_find_a_changed_sample(tmp_path, monkeypatch):
    data = load_lra("listops", cache_dir=tmp_path, **SHORT)
    expected = {split: (lra_checksum(rows), lra_checksum(rows, 10)) for split, rows in data.items()}
    monkeypatch.setitem(CHECKSUMS, "listops", expected)
    verify_lra("listops", data)
    data["test"] = data["test"].map(
        lambda row, number: {"label": 9 - row["label"] if number == 3 else row["label"]}, with_indices=True
    )
    with pytest.raises(ValueError, match="listops, test: checksum"):
        verify_lra("listops", data)
    with pytest.raises(ValueError, match="there are checksums of listops, pathfinder, not of 'text'"):
        verify_lra("text", data)


def test_columns_have_the_types_of_the_task(tmp_path):
    features = load_lra("listops", cache_dir=tmp_path, **SHORT)["train"].features
    assert features["label"].names == list("0123456789")
    features = load_lra("pathfinder", cache_dir=tmp_path, contour_length=4, **SMALL)["train"].features
    assert features["label"].names == ["apart", "joined"]
    assert (features["pixels"].length, features["pixels"].feature.dtype) == (1024, "uint8")


@pytest.mark.parametrize(
    ("task", "settings", "error", "message"),
    [
        ("listop", {}, ValueError, "task must be one of listops, text, retrieval, image, pathfinder, got 'listop'"),
        ("listops", {"depth": 3}, ValueError, "listops has no setting 'depth'; it has train_size"),
        ("image", {"max_length": 3}, ValueError, "image has no setting 'max_length'; it has none"),
        ("listops", {"min_length": 3000}, ValueError, "no expression is longer than min_length 3000"),
        ("pathfinder", {"train_size": -1}, ValueError, "train_size must be at least 1, got -1"),
        ("pathfinder", {"num_proc": 0}, ValueError, "num_proc must be at least 1, got 0"),
        ("pathfinder", {"path": "images"}, ValueError, "pathfinder is generated and takes no path, got 'images'"),
        ("text", {"max_length": 0}, ValueError, "max_length must be at least 1, got 0"),
        ("text", {"validation_share": 1.0}, ValueError, "validation_share must be from 0 to below 1, got 1.0"),
        ("text", {"path": "nowhere"}, FileNotFoundError, r"text needs train.jsonl or train.jsonl.gz, test.jsonl or"),
        ("retrieval", {}, FileNotFoundError, "retrieval needs path=: a folder with new_aan_pairs.train.tsv"),
        ("retrieval", {"path": "nowhere"}, FileNotFoundError, "retrieval needs new_aan_pairs.train.tsv"),
    ],
)
def test_errors_come_before_anything_is_written(task, settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_lra(task, cache_dir=tmp_path / "cache", **settings)
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def reviews(tmp_path):
    """A short text, one whose cut falls into a letter of two bytes, and ten more."""
    folder = tmp_path / "reviews"
    folder.mkdir()
    rows = [{"text": "dull", "label": "neg"}, {"text": "abcdé and more", "label": 1}]
    rows += [{"text": f"number {number}\u2028b", "label": number % 2} for number in range(10)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with gzip.open(folder / "test.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "fine", "label": "pos"}))
    return folder


def test_text_is_cut_by_bytes(reviews, tmp_path):
    data = load_lra("text", reviews, cache_dir=tmp_path / "cache", max_length=5)
    assert data["train"]["text"][:2] == ["dull", "abcd"]
    assert data["train"]["label"][:4] == [0, 1, 0, 1]
    assert data["validation"]["text"][:] == data["test"]["text"][:] == ["fine"]
    held_out = load_lra("text", reviews, cache_dir=tmp_path / "cache", validation_share=0.25)
    assert {split: len(rows) for split, rows in held_out.items()} == {"train": 9, "validation": 3, "test": 1}
    both = held_out["train"]["text"][:] + held_out["validation"]["text"][:]
    assert len(set(both)) == 12


def test_files_that_change_are_read_again(reviews, tmp_path):
    first = load_lra("text", reviews, cache_dir=tmp_path / "cache")
    (reviews / "train.jsonl").write_text(json.dumps({"text": "another", "label": 0}))
    second = load_lra("text", reviews, cache_dir=tmp_path / "cache")
    assert (len(first["train"]), len(second["train"])) == (12, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "label": "good"}, "text 1: the label must be one of neg, pos or its number, got 'good'"),
        ({"text": "a", "label": 2}, "the label must be one of neg, pos or its number, got 2"),
        ({"review": "a", "label": 1}, "text 1: no column 'text', only review, label"),
    ],
)
def test_texts_that_cannot_be_read(row, message, reviews, tmp_path):
    (reviews / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        load_lra("text", reviews, cache_dir=tmp_path / "cache")


def test_the_hub_is_named_where_there_are_no_files(tmp_path, monkeypatch):
    """Text and Image by the names that these data sets have there."""
    requests = []

    def load_dataset(name, configuration, split):
        requests.append((name, split))
        if "imdb" in name:
            return datasets.Dataset.from_dict({"text": ["x"], "label": [1]})
        pixels = [np.full((32, 32, 3), number, dtype=np.uint8) for number in range(20)]
        rows = {"img": [PIL.Image.fromarray(image) for image in pixels], "label": list(range(10)) * 2}
        return datasets.Dataset.from_dict(
            rows, features=datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
        )

    monkeypatch.setattr(hub_data, "load_dataset", load_dataset)
    text = load_lra("text", cache_dir=tmp_path)
    assert set(requests) == {("stanfordnlp/imdb", "train"), ("stanfordnlp/imdb", "test")}
    assert text["train"][0] == {"text": "x", "label": 1}
    requests.clear()
    image = load_lra("image", cache_dir=tmp_path)
    assert requests == [("uoft-cs/cifar10", "train"), ("uoft-cs/cifar10", "test")]
    assert [len(image[split]) for split in SPLITS] == [18, 2, 20]
    assert image["validation"][0] == {"pixels": [18] * 1024, "label": 8}


def test_grey_is_that_of_the_standard():
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [10, 20, 30]], dtype=np.uint8)
    assert sources.grey(colours).tolist() == [76, 150, 29, 255, 18]
    exact = colours @ np.array([0.299, 0.587, 0.114])
    assert np.abs(sources.grey(colours) - exact).max() <= 0.5


def test_images_of_a_folder_and_of_a_tar_file(tmp_path):
    """Classes are mixed, so that the last tenth has all of them."""
    for kind in ("train", "test"):
        for number, name in enumerate(sources.CIFAR10_CLASSES):
            folder = tmp_path / "folder" / kind / name
            folder.mkdir(parents=True)
            for image in range(10):
                PIL.Image.new("RGB", (32, 32), (number, image, 0)).save(folder / f"{name}_{image:04}.png")
        (tmp_path / "tar").mkdir(exist_ok=True)
        with tarfile.open(tmp_path / "tar" / f"{kind}.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "folder" / kind, kind)
    data = load_lra("image", tmp_path / "folder", cache_dir=tmp_path / "cache")
    assert [len(data[split]) for split in SPLITS] == [90, 10, 100]
    assert sorted(data["validation"]["label"]) == list(range(10))
    assert data["train"][11]["pixels"] == [sources.grey(np.array([1, 1, 0])).item()] * 1024
    packed = load_lra("image", tmp_path / "tar", cache_dir=tmp_path / "cache")
    assert packed["train"]["pixels"][:] == data["train"]["pixels"][:]
    (tmp_path / "folder" / "test" / "unicorn").mkdir()
    PIL.Image.new("RGB", (32, 32)).save(tmp_path / "folder" / "test" / "unicorn" / "0.png")
    with pytest.raises(ValueError, match="unicorn: the label must be one of airplane"):
        load_lra("image", tmp_path / "folder", cache_dir=tmp_path / "other")


def test_images_that_change_are_read_again(tmp_path):
    """A folder of folders keeps its own time and size, whatever happens to the files in them."""

    def put(kind, number, value):
        folder = tmp_path / "data" / kind / "cat"
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (32, 32), (value, value, value)).save(folder / f"{number}.bmp")

    def load():
        data = load_lra("image", tmp_path / "data", cache_dir=tmp_path / "cache")
        return len(data["train"]), data["test"][0]["pixels"][0]

    for number in range(10):
        put("train", number, 1)
        put("test", number, 1)
    assert load() == (9, 1)
    put("train", 10, 1)
    assert load() == (10, 1)
    file = tmp_path / "data" / "test" / "cat" / "0.bmp"
    size, time = file.stat().st_size, file.stat().st_mtime_ns
    put("test", 0, 200)
    assert file.stat().st_size == size
    os.utime(file, ns=(time, time + 1))
    assert load() == (10, 200)


def test_an_image_of_another_size(tmp_path):
    for kind in ("train", "test"):
        with tarfile.open(tmp_path / f"{kind}.tar", "w") as archive:
            data = io.BytesIO()
            PIL.Image.new("RGB", (28, 28)).save(data, "png")
            member = tarfile.TarInfo(f"{kind}/cat/0.png")
            member.size = data.tell()
            data.seek(0)
            archive.addfile(member, data)
    with pytest.raises(ValueError, match=r"an image must have 32 x 32 pixels, got \(28, 28\)"):
        load_lra("image", tmp_path, cache_dir=tmp_path / "cache")


def test_retrieval_files(tmp_path):
    """As in the release: no header, quotation marks that open nothing, labels written as fractions."""
    for name in ("train", "eval", "test"):
        lines = [f'{label}.0\tP{label}\tQ\tthe " first {name}\tthe second' for label in (0, 1)]
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")
    data = load_lra("retrieval", tmp_path, cache_dir=tmp_path / "cache", max_length=11)
    assert data["validation"][1] == {"text1": 'the " first', "text2": "the second", "label": 1}
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("1.0\ta\tb\tonly one\n")
    with pytest.raises(ValueError, match=r"eval.tsv, line 1: 5 columns divided by tabs are needed, got 4"):
        load_lra("retrieval", tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("task", TASKS)
def test_batches(task):
    """Every token has its own number, padding has none of them, and what a tokenizer says is what a model gets."""
    rows = {
        "listops": [{"text": "[MAX 1 2 ]", "label": 2}, {"text": "7", "label": 7}],
        "text": [{"text": "aé", "label": 0}, {"text": "", "label": 1}],
        "retrieval": [{"text1": "a", "text2": "bcd", "label": 0}, {"text1": "xyz", "text2": "w", "label": 1}],
        "image": [{"pixels": [0, 255], "label": 9}],
        "pathfinder": [{"pixels": [0, 255], "label": 1}],
    }[task]
    tokenizer = lra_tokenizer(task)
    assert tokenizer.pad_token_id == 0
    batch = LRACollator(task, tokenizer, max_length=4)(rows)
    assert batch["labels"].tolist() == [row["label"] for row in rows]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert ids.max() < len(tokenizer)
    assert mask.any(dim=1).all()
    assert (ids[mask == 0] == 0).all()
    if task != "text":  # of which one is empty
        assert (ids[mask == 1] > 0).all()
    words = {
        "listops": rows[0].get("text"),
        "text": "aé",
        "retrieval": "a</s>bcd",
        "image": "0 255",
        "pathfinder": "0 255",
    }[task]
    assert ids[0][mask[0].bool()].tolist() == tokenizer(words, add_special_tokens=False)["input_ids"]
    if task == "retrieval":
        assert batch["token_type_ids"].tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
        towers = LRACollator(task, tokenizer, max_length=2, two_towers=True)(rows)
        assert towers["attention_mask"].tolist() == [[1, 0], [1, 1]]
        assert towers["pair_attention_mask"].tolist() == [[1, 1], [1, 0]]
        assert towers["pair_input_ids"].dtype == torch.int64
