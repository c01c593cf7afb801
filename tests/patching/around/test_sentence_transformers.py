"""Models of sentence-transformers: patched, saved, loaded, extended, reported, trained, pushed as plain ones are."""

import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Router, Transformer
from support.round_trips import own_memory
from support.sentence_models import (
    FOLDERS,
    HEADS,
    LENGTHS,
    MultiVectorEncoder,
    inside,
    outputs,
    same,
    save_plain,
    save_tokenizer,
    texts,
    train_tables,
)
from support.tiny_models import SMALL_SETTINGS
from transformers import AutoModel, BigBirdConfig, BigBirdModel

import hf_effattn
from hf_effattn.patching.sentence_transformers import watch_loading

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"method": name, **settings} for name, settings in SMALL_SETTINGS.items()},
    "cst": {"method": "cst", "slice_length": 4},
}
I_CLUSTERED = SETTINGS["i-clustered"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    """A folder of transformers for each class."""
    return {kind: save_plain(tmp_path_factory.mktemp(kind.__name__), kind) for kind in HEADS}


def made(kind: Any, folder: Any, **options: Any) -> Any:
    model = kind(str(folder), device="cpu", **options)
    own_memory(model)
    return model


def equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, actual, expected))


def test_encodes_as_the_plain_model_patched_alike(saved: dict[Any, str], attended: list[str]) -> None:
    """Prompt, pooling, Dense and truncation stay what they were."""
    settings, folder, prompt = SETTINGS["bi-clustered"], saved[SentenceTransformer], "w1 w2 w3 "
    modules = [Transformer(folder), Pooling(32, "mean"), Dense(32, 16), Normalize()]
    options = {"prompts": {"query": prompt}, "default_prompt_name": "query", "truncate_dim": 8}
    model = SentenceTransformer(modules=modules, device="cpu", **options)
    exact = model.encode(texts())
    assert hf_effattn.patch_attention(model, **settings) is model
    plain = hf_effattn.patch_attention(AutoModel.from_pretrained(folder), **settings)
    inputs = modules[0].tokenizer([prompt + text for text in texts()], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        hidden = plain(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        wanted = modules[2]({"sentence_embedding": (hidden * mask).sum(1) / mask.sum(1)})["sentence_embedding"]
    vectors = torch.as_tensor(model.encode(texts()))
    assert set(attended) == {"bi-clustered"}
    torch.testing.assert_close(*(torch.nn.functional.normalize(rows[:, :8], dim=-1) for rows in (vectors, wanted)))
    hf_effattn.unpatch_attention(model)
    assert not hasattr(inside(model).config, "effattn")
    assert (model.encode(texts()) == exact).all()


@pytest.mark.slow_except("SentenceTransformer-*", "SparseEncoder-*", "MultiVectorEncoder-*")
@pytest.mark.parametrize(
    ("kind", "method"), [*((kind, "bi-clustered") for kind in HEADS), (SentenceTransformer, "cst")]
)
def test_a_text_among_others_encodes_as_alone(kind: Any, method: str, saved: dict[Any, str]) -> None:
    model = hf_effattn.patch_attention(made(kind, saved[kind]), **SETTINGS[method])
    assert same(outputs(model, texts(), batch_size=4), outputs(model, texts(), batch_size=1))


def test_batches_are_of_like_lengths_so_min_length_decides_alike(saved: dict[Any, str], attended: list[str]) -> None:
    model = made(SentenceTransformer, saved[SentenceTransformer])
    exact = model.encode(texts(), convert_to_tensor=True)
    hf_effattn.patch_attention(model, **I_CLUSTERED | {"min_length": 30})
    # 33, 38, 40 words in one batch; 9, 12, 21 in the other
    vectors = model.encode(texts(), convert_to_tensor=True, batch_size=3)
    assert len(attended) == inside(model).config.num_hidden_layers
    for at, length in enumerate(LENGTHS):
        torch.testing.assert_close(vectors[at], model.encode(texts()[at], convert_to_tensor=True))
        assert torch.allclose(vectors[at], exact[at], atol=1e-6) == (length < 30)


@pytest.mark.parametrize(
    "settings", [I_CLUSTERED | {"layers": [0, 2]}, SETTINGS["cst"]], ids=lambda settings: settings["method"]
)
@pytest.mark.parametrize("kind", HEADS)
def test_what_was_saved_patched_comes_back_patched(
    kind: Any, settings: dict[str, Any], saved: dict[Any, str], tmp_path: Path
) -> None:
    model = made(kind, saved[kind])
    exact = outputs(model)
    hf_effattn.patch_attention(model, **settings)
    train_tables(model)
    wanted = outputs(model)
    assert not same(wanted, exact, atol=1e-4)
    model.save_pretrained(str(tmp_path))
    for loaded in (made(kind, tmp_path), hf_effattn.from_pretrained(kind, tmp_path, device="cpu")):
        own_memory(loaded)
        assert type(loaded) is kind
        assert inside(loaded).config._attn_implementation == settings["method"]
        assert equal(outputs(loaded), wanted)
    assert equal(outputs(copy.deepcopy(loaded)), wanted)
    assert equal(outputs(hf_effattn.unpatch_attention(loaded)), exact)
    assert equal(outputs(made(kind, tmp_path, model_kwargs={"attn_implementation": "sdpa"})), exact)


def test_settings_of_the_caller_win_when_loading(saved: dict[Any, str], tmp_path: Path) -> None:
    exact = saved[SentenceTransformer]
    model = hf_effattn.patch_attention(made(SentenceTransformer, exact), **I_CLUSTERED)
    model.prompts = {"query": "w1 "}
    model.save_pretrained(str(tmp_path))

    def load(folder: Any, **options: Any) -> Any:
        return hf_effattn.from_pretrained(SentenceTransformer, folder, device="cpu", **options)

    loaded = load(tmp_path, topk=5, truncate_dim=4)
    assert inside(loaded).config.effattn["topk"] == 5
    assert (loaded.prompts["query"], loaded.truncate_dim) == ("w1 ", 4)
    with pytest.raises(ValueError, match=r"saved without hf_effattn settings.*load it with SentenceTransformer for"):
        load(exact)
    assert inside(load(exact, **I_CLUSTERED)).config.effattn["clusters"] == 6
    assert inside(made(SentenceTransformer, exact)).config._attn_implementation == "sdpa"


@pytest.mark.slow_except("i-clustered")
@pytest.mark.parametrize("method", ["i-clustered", "cst"])
def test_every_transformer_of_a_router_is_patched(method: str, tmp_path: Path) -> None:
    model = FOLDERS["router"](tmp_path / "parts")
    exact = outputs(model)
    hf_effattn.extend_positions(model, 100)
    assert model.max_seq_length == 100
    hf_effattn.patch_attention(model, **SETTINGS[method])
    train_tables(model)
    wanted = outputs(model)
    model.save_pretrained(str(tmp_path / "saved"))
    for loaded, expected, was in zip(
        outputs(made(SentenceTransformer, tmp_path / "saved")), wanted, exact, strict=True
    ):
        torch.testing.assert_close(loaded, expected)
        assert not torch.allclose(loaded, was, atol=1e-4)
    with pytest.raises(ValueError, match="holds 2 transformers models"):
        hf_effattn.report(model, texts())


def test_what_cannot_be_patched_is_refused_in_words(tmp_path: Path) -> None:
    asymmetric = FOLDERS["router, static queries"](tmp_path)
    hf_effattn.patch_attention(asymmetric, **I_CLUSTERED)  # what has no attention is no obstacle
    with pytest.raises(ValueError, match=r"saves its own tokenizer.*leave out max_shard_size"):
        hf_effattn.push_to_hub(asymmetric, "sharded", max_shard_size="1GB")
    static = SentenceTransformer(modules=[asymmetric[0].sub_modules["query"][0]], device="cpu")
    for call in (
        lambda: hf_effattn.patch_attention(static, "clustered"),
        lambda: hf_effattn.extend_positions(static, 128),
        lambda: hf_effattn.report(static, texts()),
        lambda: hf_effattn.push_to_hub(static, "static"),
    ):
        with pytest.raises(ValueError, match="SentenceTransformer holds no transformers model"):
            call()
    big_bird = BigBirdModel(BigBirdConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    big_bird.save_pretrained(tmp_path / "big-bird")
    save_tokenizer(tmp_path / "big-bird")
    folders = save_plain(tmp_path / "bert"), str(tmp_path / "big-bird")
    served, unserved = ([Transformer(folder), Pooling(32)] for folder in folders)
    both = SentenceTransformer(modules=[Router.for_query_document(served, unserved)], device="cpu")
    with pytest.raises(ValueError, match="BigBirdModel"):
        hf_effattn.patch_attention(both, **I_CLUSTERED)
    assert both[0].sub_modules["query"][0].auto_model.config._attn_implementation == "sdpa"
    with pytest.raises(TypeError, match="model must be a transformers model, got SentenceTransformer"):
        hf_effattn.patch_attention(SentenceTransformer, "clustered")
    with pytest.raises(TypeError, match="must be a transformers model"):
        hf_effattn.extend_positions(SentenceTransformer, 128)
    with pytest.raises(TypeError, match=r"got SimpleNamespace; .*pass the one that this holds"):
        hf_effattn.patch_attention(SimpleNamespace(client=static), "clustered")


@pytest.mark.parametrize("kind", [SentenceTransformer, CrossEncoder])
def test_extended_positions_lengthen_what_is_read(kind: Any, saved: dict[Any, str], tmp_path: Path) -> None:
    model = made(kind, saved[kind])
    short = outputs(model)
    words = model.tokenizer.backend_tokenizer
    assert len(words.encode("w1 " * 150).ids) < 100  # as long as what was read last
    assert hf_effattn.extend_positions(model, 100) is model
    assert model.max_seq_length == len(words.encode("w1 " * 150).ids) == 100
    assert same(outputs(model), short)
    model.save_pretrained(str(tmp_path))
    loaded, long = made(kind, tmp_path), texts((90, 90))
    assert loaded.max_seq_length == 100
    assert equal(outputs(loaded, long), outputs(model, long))
    loaded.max_seq_length = 64
    assert not same(outputs(loaded, long), outputs(model, long), atol=1e-4)
    with pytest.raises(ValueError, match="takes 100 tokens already"):
        hf_effattn.extend_positions(model, 99)


def test_a_patch_that_no_text_reaches_is_warned_of(saved: dict[Any, str]) -> None:
    model = made(SentenceTransformer, saved[SentenceTransformer])
    model.max_seq_length = 20
    with pytest.warns(UserWarning, match=r"takes at most 20 tokens.*call extend_positions") as caught:
        hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=30)
    assert caught[0].filename == __file__


@pytest.mark.skipif(MultiVectorEncoder is None, reason="of newer versions")
def test_documents_with_a_length_of_their_own_are_cut_there(tmp_path: Path) -> None:
    """ColBERT's checkpoints cut documents at 180 or 300 tokens, whatever the model takes."""
    model = made(MultiVectorEncoder, save_plain(tmp_path, MultiVectorEncoder))
    model[0].document_length = 20
    with pytest.warns(UserWarning, match=r"takes at most 20 tokens.*call extend_positions"):
        hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=30)
    report = hf_effattn.report(model, texts((40,)), [I_CLUSTERED], repeats=0, memory=False)
    assert report.inputs[0].length == 20
    hf_effattn.extend_positions(model, 100)
    assert len(model.encode_document(texts((90,)))[0]) > 64


def test_trains_and_resumes(saved: dict[Any, str], tmp_path: Path) -> None:
    """Resumed, a converted model was refused: the exact model that was loaded beside it has no position tables."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    model = hf_effattn.patch_attention(made(SentenceTransformer, saved[SentenceTransformer]), "cst")
    outputs(model)  # in inference mode: nothing of it may stay
    data = Dataset.from_dict({"anchor": texts()[:4], "positive": texts()[2:]})
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path), max_steps=2, save_strategy="steps", save_steps=1, disable_tqdm=True, **options
    )
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)
    trainer.train()
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    for trained in ("query", "hf_effattn_cst"):
        assert any(trained in name for name in changed)
    expected = outputs(model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(outputs(model), expected)


@pytest.mark.parametrize("kind", [SentenceTransformer, CrossEncoder])
def test_a_report_takes_texts(kind: Any, saved: dict[Any, str]) -> None:
    model = hf_effattn.patch_attention(made(kind, saved[kind]), **I_CLUSTERED)
    before = outputs(model)
    inputs: Any = texts((30, 20))
    length = 32
    if kind is CrossEncoder:
        inputs, length = list(zip(texts((5, 5)), inputs, strict=True)), 38
    report = hf_effattn.report(model, inputs, [I_CLUSTERED], repeats=0, memory=False)
    assert report.environment["model"] == type(inside(model)).__name__
    assert [measured.length for measured in report.inputs] == [length, length - 10]
    of_first = hf_effattn.report(model, inputs[0], [I_CLUSTERED], repeats=0, memory=False)
    assert of_first.measurements[1].change == report.measurements[1].change
    encoded = model.tokenizer(*([inputs[0]] if isinstance(inputs[0], str) else inputs[0]), return_tensors="pt")
    plain = hf_effattn.report(inside(model), encoded, [I_CLUSTERED], repeats=0, memory=False)
    assert of_first.measurements[1].change == plain.measurements[1].change
    assert equal(outputs(model), before)
    with pytest.raises(TypeError, match="must be a dict of tensors"):
        hf_effattn.report(model, [1, 2])


def test_a_report_reads_the_default_prompt_and_shows_the_words(saved: dict[Any, str]) -> None:
    model = made(SentenceTransformer, saved[SentenceTransformer])
    model.prompts, model.default_prompt_name = {"query": "w1 w2 "}, "query"
    report = hf_effattn.report(model, texts((10,)), [I_CLUSTERED], repeats=0, memory=False)
    assert report.inputs[0].length == 14
    assert "The first text, 14 tokens." in report.to_html(model, texts((10,)))


def test_an_exported_graph_of_a_patched_model_is_said_to_be_exact() -> None:
    class Graph:
        def __init__(self, model_name_or_path: str) -> None:
            self.auto_model = SimpleNamespace(config=SimpleNamespace(effattn={"method": "clustered"}))

    def never(*of_the_model: Any) -> None:
        raise AssertionError(of_the_model)

    watch_loading(Graph, never, nullcontext)
    with pytest.warns(UserWarning, match="a-folder was saved patched.*has the attention that it was exported with"):
        Graph("a-folder")


def test_a_card_says_how_to_load_it(saved: dict[Any, str]) -> None:
    """Pushed, and loaded in a fresh process: tests/cli/test_sentence_models.py."""
    model = hf_effattn.patch_attention(made(SentenceTransformer, saved[SentenceTransformer]), **I_CLUSTERED)
    card = str(hf_effattn.model_card(model, repo_id="me/patched"))
    assert "from sentence_transformers import SentenceTransformer" in card
    assert 'hf_effattn.from_pretrained(SentenceTransformer, "me/patched")' in card
    assert "library_name: sentence-transformers" in card
    assert "pipeline_tag: sentence-similarity" in card
    assert "hf_effattn[sentence-transformers]" in card
