"""The encoder as a function: it travels to other processes, and its vectors are those of `effattn embed`."""

import json
import pickle
import re
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from datasets.fingerprint import Hasher
from support.embedding_cases import save_documents, save_encoder, text
from typer.testing import CliRunner

import hf_effattn
from hf_effattn import embedding
from hf_effattn.cli import app
from hf_effattn.embedding import TextEncoder

LENGTHS = [3, 40, 12, 61, 7, 25, 1, 33, 90, 64]
METHOD = "bi-clustered clusters=6 topk=8 key_clusters=7 min_length=0"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_encoder(tmp_path_factory.mktemp("encoder")))


@pytest.fixture(scope="module")
def texts():
    return [text(length, number) for number, length in enumerate(LENGTHS)]


@pytest.mark.compatibility("datasets", "`map(batched=True, num_proc=2)` with `TextEncoder`", "runs")
def test_every_process_of_a_map_gives_the_same_bits(model, texts):
    """Each text alone: then they do not depend on how rows are divided."""
    encode = TextEncoder(model, method=METHOD, column="body", threads=1, batch_tokens=1, max_length=64)
    expected = encode({"body": texts})["vector"]
    rows = datasets.Dataset.from_dict({"body": texts, "number": list(range(len(texts)))})
    mapped = rows.map(encode, batched=True, batch_size=3, num_proc=2)
    assert mapped["number"] == rows["number"]
    np.testing.assert_array_equal(np.array(mapped["vector"], np.float32), expected)


def test_the_lines_of_the_page_run(model, texts):
    """As printed, with a tiny local model in place of its name on the Hub; the other engines have a script."""
    page = (Path(embedding.__file__).parent / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert "num_proc=2" in code
    names = {"rows": datasets.Dataset.from_dict({"text": texts})}
    exec(code.replace('"BAAI/bge-m3"', repr(model)).replace("8192", "64"), names)
    assert np.array(names["rows"]["vector"]).shape == (len(texts), 16)


@pytest.mark.parametrize(
    "options",
    [{"max_length": 64}, {"chunk": 32, "normalize": True}, {"max_length": 100, "extend_positions": True}],
    ids=lambda options: " ".join(options),
)
def test_the_vectors_are_those_of_the_command(options, model, texts, tmp_path):
    arguments = [
        "embed",
        model,
        str(save_documents(tmp_path / "documents", LENGTHS)),
        "--output",
        str(tmp_path / "out"),
    ]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    result = CliRunner().invoke(app, [*arguments, "--method", METHOD, "--batch-tokens", "1"])
    assert result.exit_code == 0, result.output
    names = [json.loads(line)["id"] for line in (tmp_path / "out" / "ids.jsonl").read_text().splitlines()]
    alone = TextEncoder(model, method=METHOD, batch_tokens=1, **options)
    ordered = [texts[int(name.rpartition("/")[2].removesuffix(".txt"))] for name in names]
    expected = np.load(tmp_path / "out" / "vectors.npy")
    np.testing.assert_array_equal(alone({"text": ordered})["vector"], expected)
    exact = TextEncoder(model, **options)({"text": ordered})["vector"]
    assert not np.allclose(exact, expected, atol=1e-5)


def test_texts_that_are_padded_together_keep_their_vectors(model, texts):
    alone = TextEncoder(model, max_length=64, batch_tokens=1)({"text": texts})["vector"]
    together = TextEncoder(model, max_length=64)({"text": np.array(texts), "number": LENGTHS})
    torch.testing.assert_close(torch.from_numpy(together["vector"]), torch.from_numpy(alone))
    assert (together["vector"].dtype, together["vector"].shape) == (np.float32, (len(texts), 16))
    assert together["number"] == LENGTHS


def test_a_frame_becomes_a_frame(model, texts):
    encode = TextEncoder(model, max_length=64)
    frame = pd.DataFrame({"text": texts, "number": LENGTHS}, index=range(5, 5 + len(texts)))
    encoded = encode(frame)
    assert list(encoded) == ["text", "number", "vector"]
    assert list(encoded.index) == list(frame.index)
    np.testing.assert_array_equal(np.stack(encoded["vector"]), encode({"text": texts})["vector"])


def test_it_pickles_without_its_model(model, texts):
    encode = TextEncoder(model, max_length=64)
    before, fingerprint = pickle.dumps(encode), Hasher.hash(encode)
    expected = encode({"text": texts})["vector"]
    assert pickle.dumps(encode) == before
    assert len(before) < 1000
    assert Hasher.hash(encode) == fingerprint != Hasher.hash(TextEncoder(model, max_length=63))
    np.testing.assert_array_equal(pickle.loads(before)({"text": texts})["vector"], expected)


def test_a_saved_patch_runs_and_threads_are_set(model, texts, tmp_path, monkeypatch):
    from transformers import AutoModel, AutoTokenizer

    patched = hf_effattn.patch_attention(AutoModel.from_pretrained(model), "clustered", clusters=6, min_length=0)
    patched.save_pretrained(tmp_path / "patched")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "patched")
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    saved = TextEncoder(str(tmp_path / "patched"), max_length=64, threads=3)({"text": texts})["vector"]
    assert given == [3]
    named = TextEncoder(model, max_length=64, method="clustered clusters=6 min_length=0")({"text": texts})["vector"]
    np.testing.assert_array_equal(saved, named)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["ba", " \n"], "text 1 of the batch is empty"),
        (["ba", None], "text 1 of the batch is None"),
        (["ba " * 70], "text 0 of the batch has more than the 64 tokens that the model takes"),
    ],
)
def test_a_row_that_cannot_be_encoded_is_named(given, message, model):
    with pytest.raises(ValueError, match=message):
        TextEncoder(model)({"text": given})


def test_a_vector_that_is_not_finite_is_named(model):
    encode = TextEncoder(model)
    encode({"text": ["ba"]})
    with torch.no_grad():
        encode._loaded.model.embeddings.word_embeddings.weight[4] = torch.nan  # of "ba"
    with pytest.raises(ValueError, match="the vector of text 1 of the batch is not finite in float32"):
        encode({"text": ["be bi bo be", "ba"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extend_positions": True}, "extend_positions needs max_length"),
        ({"method": "j-clustered"}, "did you mean"),
        ({"dtype": "int8"}, "must be one of"),
        ({"max_error": 0.1}, "max_error"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        TextEncoder("no model", **options)
