"""Models of sentence-transformers: patched, saved, loaded, extended, reported, trained, pushed as plain ones are."""

import copy
import json
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
)
from support.hub_server import HubServer
from support.hub_state import USER
from support.round_trips import own_memory
from support.tiny_models import SMALL_SETTINGS, tiny_model
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertTokenizer,
    BigBirdConfig,
    BigBirdModel,
    MPNetConfig,
    MPNetModel,
)

import hf_effattn
from hf_effattn.patching.exact.architectures.t5_and_mpnet import MPNetEncoderByDistance
from hf_effattn.patching.sentence_transformers import watch_loading

WORDS = [f"w{number}" for number in range(55)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# As `encode` sees them, of all lengths in no order.
LENGTHS = (33, 9, 40, 21, 12, 38)
HEADS = {
    SentenceTransformer: AutoModel,
    SparseEncoder: AutoModelForMaskedLM,
    CrossEncoder: AutoModelForSequenceClassification,
}
CLASSES = tuple(HEADS)
ALL_SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"method": name, **settings} for name, settings in SMALL_SETTINGS.items()},
    "cst": {"method": "cst", "slice_length": 4},
}
I_CLUSTERED = ALL_SETTINGS["i-clustered"]


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    draw = torch.Generator().manual_seed(7)
    return [" ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (n,), generator=draw)) for n in lengths]


def plain_folder(folder: Path, model: Any) -> str:
    """A tiny model of transformers with a tokenizer, saved."""
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + WORDS))
    BertTokenizer(str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    """A folder of transformers for each class."""
    one = {"num_labels": 1}
    models = {kind: tiny_model("bert", head, **one if kind is CrossEncoder else {}) for kind, head in HEADS.items()}
    return {kind: plain_folder(tmp_path_factory.mktemp(kind.__name__), model) for kind, model in models.items()}


def made(kind: Any, saved: dict[Any, str]) -> Any:
    model = kind(saved[kind], device="cpu")
    own_memory(model)
    return model


def outputs(model: Any, inputs: list[str], **options: Any) -> torch.Tensor:
    """Embeddings, or the scores of a CrossEncoder for each text beside the first."""
    if isinstance(model, CrossEncoder):
        return torch.as_tensor(model.predict([(inputs[0][:30], text) for text in inputs], **options))
    result = model.encode(inputs, convert_to_tensor=True, **options)
    return result.to_dense() if result.is_sparse else result


def train_tables(model: Any) -> None:
    """Give the position tables of a conversion values other than those that they begin with."""
    for name, parameter in model.named_parameters():
        if "hf_effattn_cst" in name:
            torch.nn.init.normal_(parameter)


def inside(model: Any) -> Any:
    return model[0].auto_model


@pytest.mark.parametrize("method", SMALL_SETTINGS)
def test_encodes_as_the_plain_model_patched_alike(saved: dict[Any, str], attended: list[str], method: str) -> None:
    """Prompt, pooling, Dense and truncation stay what they were."""
    transformer = Transformer(saved[SentenceTransformer])
    modules = [transformer, Pooling(32, "mean"), Dense(32, 16), Normalize()]
    prompts = {"query": "w1 w2 w3 "}
    model = SentenceTransformer(
        modules=modules, device="cpu", prompts=prompts, default_prompt_name="query", truncate_dim=8
    )
    exact = outputs(model, texts())
    assert hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method]) is model
    assert inside(model).config.effattn["method"] == method
    plain = hf_effattn.patch_attention(
        AutoModel.from_pretrained(saved[SentenceTransformer]), method, **SMALL_SETTINGS[method]
    )
    inputs = transformer.tokenizer([prompts["query"] + text for text in texts()], padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = plain(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        wanted = modules[2]({"sentence_embedding": (hidden * mask).sum(1) / mask.sum(1)})["sentence_embedding"]
    wanted = torch.nn.functional.normalize(wanted[:, :8], dim=-1)
    found = torch.nn.functional.normalize(outputs(model, texts()), dim=-1)
    assert set(attended) == {method}
    torch.testing.assert_close(found, wanted)
    hf_effattn.unpatch_attention(model)
    assert not hasattr(inside(model).config, "effattn")
    assert torch.equal(outputs(model, texts()), exact)


def test_mpnet_encodes_as_before_and_comes_back_patched(tmp_path: Path) -> None:
    """The type of the embeddings that are used most, which runs exactly."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    mpnet = MPNetModel(MPNetConfig(vocab_size=60, **sizes, initializer_range=0.3))
    (tmp_path / "plain").mkdir()
    model = SentenceTransformer(plain_folder(tmp_path / "plain", mpnet), device="cpu")
    exact = outputs(model, texts())
    hf_effattn.patch_attention(model, "exact")
    found = outputs(model, texts())
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    model.save_pretrained(str(tmp_path / "patched"))
    loaded = hf_effattn.from_pretrained(SentenceTransformer, tmp_path / "patched", device="cpu")
    assert type(inside(loaded).encoder) is MPNetEncoderByDistance
    assert torch.equal(outputs(loaded, texts()), found)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(outputs(model, texts()), exact)


@pytest.mark.parametrize("settings", [*ALL_SETTINGS.values()], ids=[*ALL_SETTINGS])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_text_among_others_encodes_as_alone(kind: Any, settings: dict[str, Any], saved: dict[Any, str]) -> None:
    model = hf_effattn.patch_attention(made(kind, saved), **settings)
    alone = torch.cat([outputs(model, [texts()[0], text])[1:] for text in texts()])
    torch.testing.assert_close(outputs(model, texts(), batch_size=4), alone, atol=1e-5, rtol=1e-5)


def test_batches_are_of_like_lengths_so_min_length_decides_alike(saved: dict[Any, str], attended: list[str]) -> None:
    model = made(SentenceTransformer, saved)
    exact = outputs(model, texts())
    hf_effattn.patch_attention(model, **I_CLUSTERED | {"min_length": 30})
    found = outputs(model, texts(), batch_size=3)  # 33, 38, 40 words in one batch; 9, 12, 21 in the other
    assert len(attended) == inside(model).config.num_hidden_layers
    for at, length in enumerate(LENGTHS):
        alone = outputs(model, [texts()[at]])[0]
        torch.testing.assert_close(found[at], alone)
        assert torch.allclose(found[at], exact[at], atol=1e-6) == (length < 30)


@pytest.mark.parametrize(
    "settings", [I_CLUSTERED | {"layers": [0, 2]}, ALL_SETTINGS["cst"]], ids=lambda settings: settings["method"]
)
@pytest.mark.parametrize("kind", CLASSES)
def test_what_was_saved_patched_comes_back_patched(
    kind: Any, settings: dict[str, Any], saved: dict[Any, str], tmp_path: Path
) -> None:
    model = made(kind, saved)
    exact = outputs(model, texts())
    hf_effattn.patch_attention(model, **settings)
    train_tables(model)
    wanted = outputs(model, texts())
    assert not torch.allclose(wanted, exact, atol=1e-4)
    model.save_pretrained(str(tmp_path))
    for loaded in (kind(str(tmp_path), device="cpu"), hf_effattn.from_pretrained(kind, tmp_path, device="cpu")):
        assert type(loaded) is kind
        own_memory(loaded)
        assert inside(loaded).config._attn_implementation == settings["method"]
        assert torch.equal(outputs(loaded, texts()), wanted)
        assert torch.equal(outputs(copy.deepcopy(loaded), texts()), wanted)
        assert torch.equal(outputs(hf_effattn.unpatch_attention(loaded), texts()), exact)
    asked = kind(str(tmp_path), device="cpu", model_kwargs={"attn_implementation": "sdpa"})
    own_memory(asked)
    assert torch.equal(outputs(asked, texts()), exact)


def test_settings_and_methods_of_the_caller_win_when_loading(saved: dict[Any, str], tmp_path: Path) -> None:
    model = hf_effattn.patch_attention(made(SentenceTransformer, saved), **I_CLUSTERED)
    model.prompts = {"query": "w1 "}
    model.save_pretrained(str(tmp_path))
    loaded = hf_effattn.from_pretrained(SentenceTransformer, tmp_path, device="cpu", topk=5, truncate_dim=4)
    assert inside(loaded).config.effattn["topk"] == 5
    assert (loaded.prompts["query"], loaded.truncate_dim) == ("w1 ", 4)
    other = hf_effattn.from_pretrained(
        SentenceTransformer, tmp_path, device="cpu", method="clustered", clusters=3, min_length=0, layers=[1]
    )
    assert inside(other).config.effattn["method"] == "clustered"
    assert inside(other).config.effattn["layers"] == [1]
    exact = saved[SentenceTransformer]
    with pytest.raises(ValueError, match=r"saved without hf_effattn settings.*load it with SentenceTransformer for"):
        hf_effattn.from_pretrained(SentenceTransformer, exact, device="cpu")
    first = hf_effattn.from_pretrained(SentenceTransformer, exact, device="cpu", **I_CLUSTERED)
    assert inside(first).config.effattn["clusters"] == 6
    assert inside(SentenceTransformer(exact, device="cpu")).config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="'clustered' has no setting 'topk'"):
        hf_effattn.from_pretrained(SentenceTransformer, tmp_path, method="clustered", topk=3)


def router(saved: dict[Any, str], document: list[Any]) -> Any:
    query = [Transformer(saved[SentenceTransformer]), Pooling(32, "mean")]
    return SentenceTransformer(modules=[Router.for_query_document(query, document)], device="cpu")


@pytest.mark.parametrize("settings", [I_CLUSTERED, ALL_SETTINGS["cst"]], ids=["i-clustered", "cst"])
def test_every_transformer_of_a_router_is_patched(
    settings: dict[str, Any], saved: dict[Any, str], tmp_path: Path
) -> None:
    other = plain_folder(tmp_path, tiny_model("bert", seed=3, hidden_size=16))
    model = router(saved, [Transformer(other), Pooling(16, "mean")])
    exact = [encode(texts()) for encode in (model.encode_query, model.encode_document)]
    hf_effattn.extend_positions(model, 100)
    assert model.max_seq_length == 100
    hf_effattn.patch_attention(model, **settings)
    train_tables(model)
    wanted = [encode(texts()) for encode in (model.encode_query, model.encode_document)]
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    own_memory(loaded)
    for encode, was, is_now in zip((loaded.encode_query, loaded.encode_document), exact, wanted, strict=True):
        assert (encode(texts()) == is_now).all()
        assert not (is_now == was).all()
    with pytest.raises(ValueError, match="holds 2 transformers models"):
        hf_effattn.report(model, texts())


def test_what_cannot_be_patched_is_refused_in_words(saved: dict[Any, str], tmp_path: Path) -> None:
    static = StaticEmbedding(BertTokenizer.from_pretrained(saved[SentenceTransformer])._tokenizer, embedding_dim=32)
    model = SentenceTransformer(modules=[static], device="cpu")
    for call in (
        lambda: hf_effattn.patch_attention(model, "clustered"),
        lambda: hf_effattn.extend_positions(model, 128),
        lambda: hf_effattn.report(model, texts()),
        lambda: hf_effattn.push_to_hub(model, "static"),
    ):
        with pytest.raises(ValueError, match="SentenceTransformer holds no transformers model"):
            call()
    asymmetric = router(saved, [static])
    hf_effattn.patch_attention(asymmetric, **I_CLUSTERED)  # what has no attention is no obstacle
    big_bird = BigBirdModel(BigBirdConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    unserved = router(saved, [Transformer(plain_folder(tmp_path, big_bird)), Pooling(32, "mean")])
    with pytest.raises(ValueError, match="BigBirdModel"):
        hf_effattn.patch_attention(unserved, **I_CLUSTERED)
    assert unserved[0].sub_modules["query"][0].auto_model.config._attn_implementation == "sdpa"
    with pytest.raises(TypeError, match="model must be a transformers model, got SentenceTransformer"):
        hf_effattn.patch_attention(SentenceTransformer, "clustered")
    with pytest.raises(TypeError, match="must be a transformers model"):
        hf_effattn.extend_positions(SentenceTransformer, 128)
    with pytest.raises(ValueError, match=r"saves its own tokenizer.*leave out max_shard_size"):
        hf_effattn.push_to_hub(asymmetric, "sharded", max_shard_size="1GB")


@pytest.mark.parametrize("kind", CLASSES)
def test_extended_positions_lengthen_what_is_read(kind: Any, saved: dict[Any, str], tmp_path: Path) -> None:
    model = made(kind, saved)
    short = outputs(model, texts())
    assert hf_effattn.extend_positions(model, 100) is model
    assert model.max_seq_length == 100
    torch.testing.assert_close(outputs(model, texts()), short)
    long = texts((90,)) * 2
    model.save_pretrained(str(tmp_path))
    loaded = kind(str(tmp_path), device="cpu")
    own_memory(loaded)
    assert loaded.max_seq_length == 100
    assert torch.equal(outputs(loaded, long), outputs(model, long))
    loaded.max_seq_length = 64
    assert not torch.allclose(outputs(loaded, long), outputs(model, long), atol=1e-4)
    with pytest.raises(ValueError, match="takes 100 tokens already"):
        hf_effattn.extend_positions(model, 99)


def test_a_patch_that_no_text_reaches_is_warned_of(saved: dict[Any, str]) -> None:
    model = made(SentenceTransformer, saved)
    model.max_seq_length = 20
    with pytest.warns(UserWarning, match=r"takes at most 20 tokens.*call extend_positions") as caught:
        hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=30)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("method", ["i-clustered", "cst"])
def test_trains_and_resumes(method: str, saved: dict[Any, str], tmp_path: Path) -> None:
    """Resumed, a converted model was refused: the exact model that was loaded beside it has no position tables."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    model = hf_effattn.patch_attention(made(SentenceTransformer, saved), method, **SMALL_SETTINGS.get(method, {}))
    outputs(model, texts())  # in inference mode: nothing of it may stay
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
    assert any("query" in name for name in changed)
    assert any("hf_effattn_cst" in name for name in changed) == (method == "cst")
    trained = outputs(model, texts())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(outputs(model, texts()), trained)


@pytest.mark.usefixtures("newest_peft")
def test_adapters_load_onto_the_converted_base(saved: dict[Any, str], tmp_path: Path) -> None:
    """The base's other weights are in its own folder, which the adapter only names."""
    base = hf_effattn.patch_attention(made(SentenceTransformer, saved), **ALL_SETTINGS["cst"])
    train_tables(base)
    base.save_pretrained(str(tmp_path / "base"))
    model = SentenceTransformer(str(tmp_path / "base"), device="cpu")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = SentenceTransformer(str(tmp_path / "adapter"), device="cpu")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    torch.testing.assert_close(outputs(loaded, texts()), outputs(model, texts()))
    assert not torch.allclose(outputs(loaded, texts()), outputs(base, texts()), atol=1e-4)


@pytest.mark.parametrize("kind", [SentenceTransformer, CrossEncoder])
def test_a_report_takes_texts(kind: Any, saved: dict[Any, str]) -> None:
    model = hf_effattn.patch_attention(made(kind, saved), **I_CLUSTERED)
    before = outputs(model, texts())
    inputs: Any = texts((30, 20))
    length = 32
    if kind is CrossEncoder:
        inputs, length = list(zip(texts((5, 5)), inputs, strict=True)), 38
    report = hf_effattn.report(model, inputs, [I_CLUSTERED], repeats=0, memory=False)
    assert report.environment["model"] == type(inside(model)).__name__
    assert [one.length for one in report.inputs] == [length, length - 10]
    one = hf_effattn.report(model, inputs[0], [I_CLUSTERED], repeats=0, memory=False)
    assert one.measurements[1].change == report.measurements[1].change
    encoded = model.tokenizer(*([inputs[0]] if isinstance(inputs[0], str) else inputs[0]), return_tensors="pt")
    plain = hf_effattn.report(inside(model), encoded, [I_CLUSTERED], repeats=0, memory=False)
    assert one.measurements[1].change == plain.measurements[1].change
    assert torch.equal(outputs(model, texts()), before)
    with pytest.raises(TypeError, match="must be a dict of tensors"):
        hf_effattn.report(model, [1, 2])


def test_a_report_reads_the_default_prompt_and_shows_the_words(saved: dict[Any, str]) -> None:
    model = made(SentenceTransformer, saved)
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


@pytest.mark.slow
def test_pushed_and_loaded_in_a_fresh_process(saved: dict[Any, str], tmp_path: Path) -> None:
    """One process loads what was saved here, pushes it, and loads it from the Hub."""
    modules = [Transformer(saved[SentenceTransformer]), Pooling(32, "mean"), Dense(32, 16)]
    model = hf_effattn.patch_attention(SentenceTransformer(modules=modules, device="cpu"), **I_CLUSTERED)
    model.save_pretrained(str(tmp_path / "saved"))
    code = f"""
        import json
        from sentence_transformers import SentenceTransformer
        import hf_effattn  # after it; in this file's process before it
        model = SentenceTransformer({str(tmp_path / "saved")!r}, device="cpu")
        hf_effattn.push_to_hub(model, "patched", commit_message="all modules")
        again = SentenceTransformer("{USER}/patched", device="cpu")
        texts = {texts((33, 12))!r}
        print(json.dumps([one.encode(texts).tolist() for one in (model, again)]))
    """
    with HubServer(tmp_path / "hub") as hub:
        said = hub.run("-c", textwrap.dedent(code), home=tmp_path / "home", token=hub.token)
        files = set(hub.files(f"{USER}/patched"))
        card = hub.content(f"{USER}/patched", "README.md").decode()
    for found in json.loads(said.splitlines()[-1]):
        torch.testing.assert_close(torch.tensor(found), outputs(model, texts((33, 12))))
    wanted = {"README.md", "config.json", "model.safetensors", "modules.json", "tokenizer.json"}
    assert wanted | {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= files
    assert "from sentence_transformers import SentenceTransformer" in card
    assert f'hf_effattn.from_pretrained(SentenceTransformer, "{USER}/patched")' in card
    assert "library_name: sentence-transformers" in card
    assert "pipeline_tag: sentence-similarity" in card
    assert "hf_effattn[sentence-transformers]" in card
