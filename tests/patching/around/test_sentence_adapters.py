"""Adapters in patched models of sentence-transformers: saved alone, and loaded with the patch on the exact base."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import sentence_transformers
import torch
from packaging.version import parse
from sentence_transformers import CrossEncoder, SentenceTransformer
from support.round_trips import own_memory
from support.sentence_models import HEADS, inside, outputs, same, save_plain, train_tables
from support.tiny_models import SMALL_SETTINGS, tiny_config
from transformers import AutoModel, VisionTextDualEncoderConfig, VisionTextDualEncoderModel

import hf_effattn
from hf_effattn.patching.loading import keep_beside_adapters

pytestmark = pytest.mark.usefixtures("newest_peft")
SETTINGS: dict[str, dict[str, Any]] = {
    "bi-clustered": SMALL_SETTINGS["bi-clustered"],
    "cst": {"slice_length": 4},
}


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
@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("kind", HEADS)
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
    asked = kind(str(tmp_path / "again"), device="cpu", model_kwargs={"attn_implementation": "sdpa"})
    assert same(outputs(asked), exact)


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


def test_settings_of_the_caller_win_over_those_beside_the_adapter(base: str, tmp_path: Path) -> None:
    adapted(base, "bi-clustered").save_pretrained(str(tmp_path / "adapter"))
    loaded = hf_effattn.from_pretrained(SentenceTransformer, tmp_path / "adapter", device="cpu", topk=5)
    assert inside(loaded).config.effattn["topk"] == 5


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
