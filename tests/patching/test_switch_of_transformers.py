"""transformers' own switch on models whose code hears of a method by its mask alone: exact, or refused by name."""

import copy
import gc
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support import tiny_exchanged, tiny_vision_language
from support.tiny_decoders import COMMON
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

import hf_effattn

SIZES = COMMON | {"num_hidden_layers": 2}


def make_model(
    model_type: str, auto_class: Any = AutoModel, *, switched: str = "eager", **sizes: Any
) -> PreTrainedModel:
    """A small random model, as `from_pretrained(..., attn_implementation=switched)` makes it.

    `set_attn_implementation` would leave those as they are that call no attention function.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    model = auto_class.from_config(config, attn_implementation=switched).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model


def inputs(texts: int) -> dict[str, torch.Tensor]:
    """Padded, also where there is one text only."""
    ids = torch.randint(5, 60, (texts, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def says(words: str) -> AbstractContextManager[Any]:
    """Versions of transformers whose encoders make their masks themselves stay exact without a word."""
    old = Version(transformers.__version__) < Version("5.23")
    return nullcontext() if old else pytest.warns(UserWarning, match=words)


# Encoders that call no attention function; of one text there may be no mask.
@pytest.mark.parametrize(
    ("model_type", "texts", "method"),
    [
        ("roformer", 1, "exact"),
        ("roformer", 3, "bi-clustered"),
        ("rembert", 3, "exact"),
        ("megatron-bert", 1, "exact"),
    ],
)
@torch.no_grad()
def test_types_outside_the_table_stay_exact_and_say_so(model_type: str, texts: int, method: str) -> None:
    given = inputs(texts)
    real = given["attention_mask"].bool()
    exact = make_model(model_type, **SIZES)(**given).last_hidden_state
    model = make_model(model_type, switched=method, **SIZES)
    with says(f'"{method}" does not know the model type "{model_type}"'):
        actual = model(**given).last_hidden_state
    torch.testing.assert_close(actual[real], exact[real])


@torch.no_grad()
def test_a_decoder_outside_the_table_does_not_see_the_future() -> None:
    sizes = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "vocab_size": 60}
    ids = inputs(2)["input_ids"]
    exact = make_model("xglm", AutoModelForCausalLM, max_position_embeddings=64, **sizes)(ids).logits
    model = make_model("xglm", AutoModelForCausalLM, switched="exact", max_position_embeddings=64, **sizes)
    with pytest.warns(UserWarning, match="does not know the model type"):
        before = model(ids).logits
    torch.testing.assert_close(before, exact)
    ids[:, -1] = (ids[:, -1] + 1) % 60
    with pytest.warns(UserWarning, match="does not know the model type"):
        after = model(ids).logits
    assert torch.equal(after[:, :-1], before[:, :-1])


@pytest.mark.parametrize(
    ("model_type", "method", "sizes"),
    [
        ("bloom", "exact", {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("mpt", "bi-clustered", {"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    ],
)
@torch.no_grad()
def test_types_known_not_to_be_served_are_refused(model_type: str, method: str, sizes: dict[str, Any]) -> None:
    """They would have seen the future: no mask says to a method that nothing later is seen."""
    model = make_model(model_type, AutoModelForCausalLM, switched=method, **sizes)
    with pytest.raises(ValueError, match=f'"{method}" does not serve .*Model: its model type "{model_type}" computes'):
        model(**inputs(2))


@pytest.mark.parametrize(("texts", "method"), [(1, "bi-clustered"), (3, "exact")])
@pytest.mark.parametrize("model_type", ["mpnet", "t5", "umt5"])
@torch.no_grad()
def test_padding_is_not_seen_where_biases_are_added(model_type: str, texts: int, method: str) -> None:
    """Unpatched, and patched beside it."""
    given = inputs(texts)
    real = given["attention_mask"].bool()
    exact_model, model = (tiny_exchanged.make_model(model_type, attn_implementation=way) for way in ("eager", method))
    exact = exact_model(**given).last_hidden_state
    torch.testing.assert_close(model(**given).last_hidden_state[real], exact[real], rtol=1e-5, atol=1e-5)
    hf_effattn.patch_attention(model, method)
    torch.testing.assert_close(model(**given).last_hidden_state[real], exact[real], rtol=1e-5, atol=1e-5)


CAUSAL = {"exact_keys": 24, "key_clusters": 2, "segment_length": 8, "window": 8, "min_length": 0}


def loaded_by_name(model: Any) -> Any:
    """As trainers make the reference of a model."""
    implementation = model.config._attn_implementation
    return type(model).from_pretrained(model.config._name_or_path, attn_implementation=implementation).eval()


def said_by(model: Any) -> list[str]:
    """What this package warns of in two calls."""
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            model(input_ids=inputs(2)["input_ids"])
    return [str(warning.message) for warning in said if "by its name" in str(warning.message)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = make_model("llama", AutoModelForCausalLM, switched="sdpa", **SIZES)
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.compatibility(
    "transformers", "a patched model loaded again by `attn_implementation=`, as trainers load a reference", "told"
)
def test_a_model_loaded_again_by_name_is_told_of_the_settings(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    hf_effattn.patch_attention(model, "bi-clustered", **CAUSAL)
    (said,) = said_by(loaded_by_name(model))
    assert "by its name, without the settings (min_length=0, segment_length=8, window=8) of a live Llama" in said
    assert len(said) <= 300
    assert said_by(model) == []
    assert said_by(copy.deepcopy(model)) == []
    alike = hf_effattn.patch_attention(loaded_by_name(model), "bi-clustered", **CAUSAL)
    assert said_by(alike) == []
    model.save_pretrained(checkpoint)  # with its settings
    assert said_by(loaded_by_name(model)) == []
    hf_effattn.patch_attention(model, "bi-clustered", layers=[1], **CAUSAL)
    (said,) = said_by(loaded_by_name(model))
    assert "(layers=[1])" in said


@pytest.mark.parametrize("gone", ["unpatched", "collected", "defaults", "method", "checkpoint"])
def test_a_method_by_its_name_alone_is_no_reason_to_warn(gone: str, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    if gone == "defaults":
        hf_effattn.patch_attention(model, "bi-clustered")
    else:
        hf_effattn.patch_attention(model, "i-clustered" if gone == "method" else "bi-clustered", **{"min_length": 0})
    other = loaded_by_name(model)
    if gone == "unpatched":
        hf_effattn.unpatch_attention(model)
    elif gone == "collected":
        del model
        gc.collect()
    elif gone == "method":
        other.set_attn_implementation("bi-clustered")
    elif gone == "checkpoint":
        sizes = make_model("llama", AutoModelForCausalLM, switched="sdpa", **SIZES).config
        other = AutoModelForCausalLM.from_config(sizes, attn_implementation="bi-clustered")
    assert said_by(other) == []


def test_the_parts_of_a_composite_model_are_told_too(tmp_path: Path) -> None:
    """Their configs do not name the checkpoint."""
    whole = tiny_vision_language.make_model("qwen2_vl")
    whole.save_pretrained(tmp_path)
    model = type(whole).from_pretrained(tmp_path)
    hf_effattn.patch_attention(model, "bi-clustered", **CAUSAL)
    implementation = {"text_config": "bi-clustered", "vision_config": "sdpa"}
    other = type(whole).from_pretrained(tmp_path, attn_implementation=implementation)
    assert len(said_by(other)) == 1
