"""Patched models of sentence-transformers with adapters, saved and loaded; and as models and guides of losses."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import sentence_transformers
import torch
from packaging.version import parse
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from support.round_trips import own_memory
from support.sentence_models import HEADS, inside, outputs, same, save_plain, texts, train_tables
from support.tiny_models import SMALL_SETTINGS, tiny_config
from transformers import AutoModel, VisionTextDualEncoderConfig, VisionTextDualEncoderModel

import hf_effattn
from hf_effattn.patching.loading import keep_beside_adapters

pytestmark = pytest.mark.usefixtures("newest_peft")
SETTINGS: dict[str, dict[str, Any]] = {"bi-clustered": SMALL_SETTINGS["bi-clustered"], "cst": {"slice_length": 4}}


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False, **options)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return save_plain(tmp_path / "base")


def adapted(base: str, method: str, **options: Any) -> Any:
    """A model that was loaded exact, patched, and given an adapter."""
    model = hf_effattn.patch_attention(SentenceTransformer(base, device="cpu"), method, **SETTINGS[method])
    own_memory(model)
    model.add_adapter(lora(**options))
    train_tables(model)
    return model.eval()


@pytest.mark.compatibility("sentence-transformers", "`add_adapter`, saved and loaded", "runs")
@pytest.mark.slow_except("SentenceTransformer-cst", "CrossEncoder-bi-clustered")
@pytest.mark.parametrize(
    ("kind", "method"), [*((kind, "bi-clustered") for kind in HEADS), (SentenceTransformer, "cst")]
)
def test_an_adapter_comes_back_with_the_patch(kind: Any, method: str, tmp_path: Path) -> None:
    model = kind(save_plain(tmp_path / "base", kind), device="cpu")
    model.add_adapter(lora())
    exact = outputs(model.eval())
    if kind is CrossEncoder and parse(sentence_transformers.__version__) < parse("6"):
        pytest.skip("sentence-transformers 5.4 asks the configuration of an adapter for the model's architectures")
    hf_effattn.patch_attention(model, method, **SETTINGS[method])
    train_tables(model)
    expected = outputs(model)
    assert not same(expected, exact)
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = kind(str(tmp_path / "adapter"), device="cpu")
    assert inside(loaded).config._attn_implementation == method
    assert same(outputs(loaded), expected)
    loaded.save_pretrained(str(tmp_path / "again"))
    assert same(outputs(hf_effattn.from_pretrained(kind, tmp_path / "again", device="cpu")), expected)
    unpatched = kind(str(tmp_path / "again"), device="cpu", model_kwargs={"attn_implementation": "sdpa"})
    assert same(outputs(unpatched), exact)


def test_tables_that_the_adapter_trains_come_back(base: str, tmp_path: Path) -> None:
    """PEFT looks for them in the exact model, and passes over what it does not find."""
    model = adapted(base, "cst", modules_to_save=["hf_effattn_cst"])
    model.save_pretrained(str(tmp_path / "adapter"))
    assert same(outputs(SentenceTransformer(str(tmp_path / "adapter"), device="cpu")), outputs(model))


def test_adapters_load_onto_a_base_that_was_saved_converted(base: str, tmp_path: Path) -> None:
    """The base's other weights are in its own folder, which the adapter only names."""
    converted = hf_effattn.patch_attention(SentenceTransformer(base, device="cpu"), "cst", **SETTINGS["cst"])
    train_tables(converted)
    converted.save_pretrained(str(tmp_path / "converted"))
    model = SentenceTransformer(str(tmp_path / "converted"), device="cpu")
    model.add_adapter(lora())
    model.save_pretrained(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = SentenceTransformer(str(tmp_path / "adapter"), device="cpu")
    assert same(outputs(loaded), outputs(model))
    assert not same(outputs(loaded), outputs(converted), atol=1e-4)


@pytest.mark.compatibility("sentence-transformers", "`get_peft_model` around its transformer", "runs")
@pytest.mark.parametrize("method", SETTINGS)
def test_a_model_that_peft_is_around_comes_back_with_the_patch(method: str, base: str, tmp_path: Path) -> None:
    model = hf_effattn.patch_attention(SentenceTransformer(base, device="cpu"), method, **SETTINGS[method])
    model[0].model = peft.get_peft_model(inside(model), lora())
    train_tables(model)
    expected = outputs(model.eval())
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = SentenceTransformer(str(tmp_path / "adapter"), device="cpu")
    own_memory(loaded)
    assert same(outputs(loaded), expected)


def test_transformers_loads_it_with_the_patch_too(base: str, tmp_path: Path) -> None:
    model = adapted(base, "cst")
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path / "adapter").eval()
    tokens = torch.randint(5, 50, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).last_hidden_state, inside(model)(tokens).last_hidden_state)


def test_an_adapter_of_a_model_that_is_not_patched_is_saved_alone(base: str, tmp_path: Path) -> None:
    model = hf_effattn.unpatch_attention(adapted(base, "bi-clustered"))
    model.save_pretrained(str(tmp_path / "adapter"))
    assert not list(tmp_path.glob("adapter/*effattn*"))
    loaded = SentenceTransformer(str(tmp_path / "adapter"), device="cpu")
    assert inside(loaded).config._attn_implementation == "sdpa"


def test_parts_that_are_patched_in_ways_of_their_own_are_told(tmp_path: Path) -> None:
    parts = VisionTextDualEncoderConfig.from_vision_text_configs(tiny_config("vit"), tiny_config("bert"))
    model = hf_effattn.patch_attention(VisionTextDualEncoderModel(parts), "bi-clustered", **SETTINGS["bi-clustered"])
    model.add_adapter(lora())
    keep_beside_adapters(model, tmp_path)
    assert json.loads((tmp_path / "effattn.json").read_text()) == model.text_model.config.effattn
    (tmp_path / "effattn.json").unlink()
    hf_effattn.patch_attention(model.text_model, "clustered", clusters=5, min_length=0)
    with pytest.warns(UserWarning, match="parts of VisionTextDualEncoderModel are patched in ways of their own"):
        keep_beside_adapters(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(attends exactly|passes)")
        yield


def patched_for_losses(kind: Any, folder: str, method: str) -> Any:
    model = kind(folder, device="cpu")
    own_memory(model)
    return hf_effattn.patch_attention(model, method, **SETTINGS[method]).eval()


LOSSES: dict[str, Any] = {
    "GISTEmbedLoss": lambda model, guide: losses.GISTEmbedLoss(model, guide),
    "CachedGISTEmbedLoss": lambda model, guide: losses.CachedGISTEmbedLoss(model, guide, mini_batch_size=1),
    "CachedMultipleNegativesRankingLoss": lambda model, _: losses.CachedMultipleNegativesRankingLoss(
        model, mini_batch_size=1
    ),
    "MatryoshkaLoss": lambda model, _: losses.MatryoshkaLoss(
        model, losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=1), [32, 8]
    ),
}


@pytest.mark.slow_except("CachedGISTEmbedLoss", "GISTEmbedLoss")
@pytest.mark.compatibility("sentence-transformers", "losses with a guide, cached ones", "runs")
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_run_model_and_guide_by_the_method(
    loss: str, tmp_path: Path, attended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*call: Any) -> None:
        raise AssertionError("a layer is exact")

    folder = save_plain(tmp_path)
    model, guide = (patched_for_losses(SentenceTransformer, folder, method) for method in SETTINGS)
    monkeypatch.setattr("hf_effattn.patching.interface.attention_function.run_exactly", never)
    features = [model.preprocess(texts()[:3]), model.preprocess(texts()[3:])]
    value = LOSSES[loss](model, guide)(features, None)
    value.backward()
    assert set(attended) == ({"bi-clustered", "cst"} if "GIST" in loss else {"bi-clustered"})
    assert any(bool(parameter.grad is not None and parameter.grad.any()) for parameter in model.parameters())


def test_a_guide_of_mini_batches_says_what_it_says_of_whole_ones(tmp_path: Path) -> None:
    """Called a second time it was another model, whose layers were exact."""
    folder = save_plain(tmp_path)
    model, guide = (patched_for_losses(SentenceTransformer, folder, "bi-clustered") for _ in range(2))
    values = []
    for name in ("GISTEmbedLoss", "CachedGISTEmbedLoss"):
        features = [model.preprocess(texts()[:3]), model.preprocess(texts()[3:])]
        values.append(LOSSES[name](model, guide)(features, None).detach())
    torch.testing.assert_close(*values)
