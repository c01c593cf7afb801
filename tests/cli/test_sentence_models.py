"""The commands on every kind of folder of sentence-transformers: nothing that the library saved is lost."""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from support.hub_server import HubServer
from support.hub_state import USER
from support.sentence_models import FOLDERS, HEADS, POSITIONS, UPPER, WORDS, outputs, texts
from typer.testing import CliRunner

import hf_effattn
from hf_effattn.cli import app
from hf_effattn.samples.model import load_text_model

runner = CliRunner()
SETTINGS = {"clusters": 2, "topk": 1, "key_clusters": 2, "min_length": 0}
# So few that short texts are approximated, too.
OF_DECODER = {"exact_keys": 6, "key_clusters": 1, "segment_length": 4, "window": 4, "min_length": 0}
OF_DOCUMENTS = [name for name in FOLDERS if name not in {kind.__name__ for kind in HEADS}]
OTHERS = [kind for kind in HEADS if kind is not SentenceTransformer]
PUSHED = ["dense, truncated", "lower case", "router", *(kind.__name__ for kind in OTHERS)]


def class_of(name: str) -> Any:
    return next((kind for kind in HEADS if kind.__name__ == name), SentenceTransformer)


def settings_of(name: str) -> dict[str, int]:
    return OF_DECODER if name == "last token, left padding" else SETTINGS


def typed(settings: dict[str, int]) -> str:
    """As the command line takes them."""
    return " ".join(["bi-clustered", *(f"{name}={value}" for name, value in settings.items())])


METHOD = typed(SETTINGS)


def said(result: Any) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for number, (name, make) in enumerate(FOLDERS.items()):
        place = tmp_path_factory.mktemp("parts")
        paths[name] = place / f"kind-{number}"
        make(place).save_pretrained(str(paths[name]), create_model_card=False)
    return paths


@pytest.fixture(scope="module")
def converted(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh process makes of texts by the converted copies, and by what it pushed of them."""
    place = tmp_path_factory.mktemp("converted")
    for name, folder in folders.items():
        method = typed(settings_of(name))
        said(runner.invoke(app, ["convert", str(folder), str(place / folder.name), "--method", method]))
    classes = {name: (class_of(name).__name__, folder.name, name in PUSHED) for name, folder in folders.items()}
    code = f"""
        import sentence_transformers, torch
        from support.sentence_models import outputs
        from hf_effattn.cli import app
        found = {{}}
        for name, (kind, folder, pushed) in {classes!r}.items():
            sources = [f"{place}/{{folder}}"]
            if pushed:
                app(["push", *sources, folder], standalone_mode=False)
                sources.append(f"{USER}/{{folder}}")
            load = getattr(sentence_transformers, kind)
            found[name] = [outputs(load(source, device="cpu")) for source in sources]
        router = "{USER}/{folders["router"].name}"
        app(["convert", router, "{place}/again", "--method", "cst slice_length=4"], standalone_mode=False)
        app(["card", router, "--show"], standalone_mode=False)
        torch.save(found, "{place}/found")
    """
    with HubServer(place / "hub") as hub:
        printed = hub.run("-c", textwrap.dedent(code), home=place / "home", token=hub.token)
        cards = {name: hub.content(f"{USER}/{folders[name].name}", "README.md").decode() for name in PUSHED}
    return {"found": torch.load(place / "found"), "cards": cards, "place": place, "printed": printed}


@pytest.mark.compatibility(
    "sentence-transformers",
    "`effattn convert` and `push`: Pooling, Dense, Router, CrossEncoder, SparseEncoder, MultiVectorEncoder",
    "runs",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_converted_copy_is_the_model_patched_wherever_it_is_loaded(
    name: str, folders: dict[str, Path], converted: dict[str, Any]
) -> None:
    kind = class_of(name)
    model = kind(str(folders[name]), device="cpu")
    exact = outputs(model)
    expected = outputs(hf_effattn.patch_attention(model, "bi-clustered", **settings_of(name)))
    for vectors in converted["found"][name]:
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
    assert not all(torch.allclose(vector, other, atol=1e-4) for vector, other in zip(exact, expected, strict=True))
    copy = kind(str(converted["place"] / folders[name].name), device="cpu")
    for saved in ("prompts", "default_prompt_name", "truncate_dim", "max_seq_length", "similarity_fn_name"):
        assert getattr(copy, saved, None) == getattr(model, saved, None)
    assert len(converted["found"][name]) == 1 + (name in PUSHED)
    if name in PUSHED:
        loads = f'hf_effattn.from_pretrained({kind.__name__}, "{USER}/{folders[name].name}")'
        assert loads in converted["cards"][name]


@pytest.mark.slow
def test_the_commands_read_a_router_on_the_hub(folders: dict[str, Path], converted: dict[str, Any]) -> None:
    model = SentenceTransformer(str(folders["router"]), device="cpu")
    expected = outputs(hf_effattn.patch_attention(model, "cst", slice_length=4))
    copy = SentenceTransformer(str(converted["place"] / "again"), device="cpu")
    torch.testing.assert_close(outputs(copy), expected, atol=1e-5, rtol=1e-5)
    assert f'(SentenceTransformer, "{USER}/{folders["router"].name}")' in converted["printed"]


@pytest.mark.slow_except("MultiVectorEncoder", "CrossEncoder", "SparseEncoder")
@pytest.mark.parametrize("name", ["mean", "router, static queries", *(kind.__name__ for kind in OTHERS)])
def test_a_converted_copy_takes_longer_texts(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    length = 400
    arguments = ["--method", METHOD, "--max-length", str(length)]
    said(runner.invoke(app, ["convert", str(folders[name]), str(tmp_path / "long"), *arguments]))
    copy = class_of(name)(str(tmp_path / "long"), device="cpu")
    (text,) = texts((2 * length,))
    pair: Any = (text, text) if name == "CrossEncoder" else text
    read = copy.preprocess([pair], **({"task": "document"} if name != "CrossEncoder" else {}))
    assert read["input_ids"].shape == (1, length)
    assert all(
        embeddings.num_embeddings >= length
        for module, embeddings in copy.named_modules()
        if module.endswith("position_embeddings")
    )


def test_a_copy_beside_a_card_leaves_it(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    said(runner.invoke(app, ["convert", str(folders["cls"]), str(tmp_path), "--method", METHOD]))
    assert (tmp_path / "README.md").read_text() == "mine"
    again = runner.invoke(app, ["convert", str(folders["cls"]), str(tmp_path)])
    assert "holds a model already" in again.output


def test_of_a_router_nothing_is_in_the_root_and_it_is_not_overwritten(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    said(runner.invoke(app, ["convert", str(folders["router"]), str(tmp_path / "copy"), "--method", METHOD]))
    again = runner.invoke(app, ["convert", str(folders["router"]), str(tmp_path / "copy")])
    assert again.exit_code == 1
    assert "holds a model already" in again.output
    shown = said(runner.invoke(app, ["card", str(tmp_path / "copy"), "--show"]))
    assert "from sentence_transformers import SentenceTransformer" in shown


def test_a_class_of_transformers_is_said_to_be_the_transformer_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["convert", str(folders["dense, truncated"]), str(tmp_path / "copy"), "--auto-class", "AutoModel"]
    assert "--auto-class writes its transformer alone" in said(runner.invoke(app, arguments))
    assert not (tmp_path / "copy" / "modules.json").exists()


def test_a_fine_tuned_conversion_is_not_converted_again(folders: dict[str, Path], tmp_path: Path) -> None:
    for source, target in ((folders["router"], "first"), (tmp_path / "first", "second")):
        result = runner.invoke(app, ["convert", str(source), str(tmp_path / target), "--method", "cst slice_length=4"])
    assert result.exit_code == 1
    assert 'is converted to "cst" already' in result.output


def save_texts(folder: Path, read: list[str]) -> Path:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(read)))
    return file


def embedded(model: Path, place: Path, *options: str) -> np.ndarray:
    documents = save_texts(place, texts(words=WORDS + UPPER))
    said(runner.invoke(app, ["embed", str(model), str(documents), "--output", str(place / "out"), *options]))
    return np.load(place / "out" / "vectors.npy")


@pytest.mark.compatibility("sentence-transformers", "`effattn embed`: the vectors of `encode_document`", "runs")
@pytest.mark.parametrize("name", [name for name in OF_DOCUMENTS if name != "short"])
def test_embed_gives_the_vectors_of_the_library(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    expected = SentenceTransformer(str(folders[name]), device="cpu").encode_document(texts(words=WORDS + UPPER))
    np.testing.assert_allclose(embedded(folders[name], tmp_path), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cls", "router"])
def test_embed_runs_a_copy_as_it_is_patched(
    name: str, folders: dict[str, Path], converted: dict[str, Any], tmp_path: Path
) -> None:
    vectors = embedded(converted["place"] / folders[name].name, tmp_path)
    documents = converted["found"][name][0][0]
    np.testing.assert_allclose(vectors, documents, rtol=1e-4, atol=1e-5)


def test_embed_gives_a_part_of_a_vector_length_1_where_asked(folders: dict[str, Path], tmp_path: Path) -> None:
    model = SentenceTransformer(str(folders["dense, truncated"]), device="cpu")
    expected = model.encode_document(texts(words=WORDS + UPPER), normalize_embeddings=True)
    vectors = embedded(folders["dense, truncated"], tmp_path, "--normalize")
    np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)
    assert vectors.shape[1] == 5


@pytest.mark.compatibility(
    "sentence-transformers", "`effattn embed` of a CrossEncoder, SparseEncoder, MultiVectorEncoder", "refused"
)
@pytest.mark.parametrize("kind", OTHERS)
def test_embed_refuses_what_makes_no_vector_of_a_document(kind: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    documents = save_texts(tmp_path, texts())
    arguments = ["embed", str(folders[kind.__name__]), str(documents), "--output", str(tmp_path / "out")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert f"the model is a {kind.__name__}, which does not make one dense vector" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["lower case", "short", "router", *(kind.__name__ for kind in OTHERS)])
def test_reports_read_texts_as_the_library_does(name: str, folders: dict[str, Path]) -> None:
    loaded = load_text_model(str(folders[name]))
    model = class_of(name)(str(folders[name]), device="cpu")
    task: Any = {} if name == "CrossEncoder" else {"task": "document"}
    (text,) = texts((15,), words=WORDS + UPPER)
    features = model.preprocess([text], **task)
    if name != "MultiVectorEncoder":  # it puts a mark before a document
        assert loaded.tokenizer(text)["input_ids"] == features["input_ids"][0].tolist()
    assert loaded.model.config.model_type == "bert"
    assert loaded.model is loaded.model.base_model
    assert not loaded.model.training
    with torch.no_grad():
        hidden = loaded.model(input_ids=features["input_ids"]).last_hidden_state
        if class_of(name) is SentenceTransformer:
            torch.testing.assert_close(model(features, **task)["token_embeddings"], hidden)


@pytest.mark.parametrize("command", ["report", "tune"])
def test_a_router_is_reported_and_tuned(command: str, folders: dict[str, Path], tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(" ".join(texts((4000,))))
    more = {
        "report": ["--repeats", "0", "--method", METHOD],
        "tune": ["--texts", "2", "--output", str(tmp_path / "tuned"), "--min-length", "0"],
    }[command]
    arguments = [command, str(folders["router"]), "--text", str(book), "--lengths", str(POSITIONS), *more]
    assert "bi-clustered" in said(runner.invoke(app, arguments))


def test_without_the_library_what_it_does_to_texts_is_not_left_out(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = save_texts(tmp_path, texts())
    settings = folders["lower case"] / "sentence_bert_config.json"
    lower = tmp_path / "lower"
    lower.mkdir()
    for file in folders["lower case"].iterdir():
        (lower / file.name).symlink_to(file)
    (lower / settings.name).unlink()
    (lower / settings.name).write_text(json.dumps(json.loads(settings.read_text()) | {"do_lower_case": True}))
    expected = embedded(folders["cls"], tmp_path)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    for model in (lower, folders["router"]):
        for command in (
            ["embed", str(model), str(documents), "--output", str(tmp_path / "new")],
            ["report", str(model)],
            ["convert", str(model), str(tmp_path / "copy")],
        ):
            result = runner.invoke(app, command)
            assert result.exit_code == 1
            assert "pip install sentence-transformers" in " ".join(result.output.split())
    (tmp_path / "plain").mkdir()
    np.testing.assert_allclose(embedded(folders["cls"], tmp_path / "plain"), expected, rtol=1e-4, atol=1e-5)
