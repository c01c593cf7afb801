"""The method that approximates nothing: what it takes, says, saves and is reported as. `test_windows.py` runs it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_decoders import make_model
from support.tiny_models import tiny_model
from transformers import AutoModel

import hf_effattn
from hf_effattn.embedding.choice import is_long_enough
from hf_effattn.hub.card import model_card
from hf_effattn.measuring.bench import bench
from hf_effattn.patching.methods import make_method
from hf_effattn.patching.methods.per_head import PerHead

METHOD = "exact"
LENGTH = 400


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def output(model: Any) -> torch.Tensor:
    return model(**tokens())[0]


def test_a_model_without_windows_stays_bit_for_bit_and_is_told() -> None:
    model = tiny_model("eurobert")
    exact = output(model)
    with pytest.warns(UserWarning, match="do nothing: no layer of EuroBertModel has a sliding window, biases of"):
        hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(output(model), exact)


def test_settings_that_would_do_nothing_are_refused() -> None:
    model = tiny_model("modernbert")
    for settings, message in (
        ({"layers": [0]}, '"exact" approximates no layer, whichever are chosen: leave layers out'),
        ({"tolerance": 0.1}, '"exact" approximates nothing: it takes no tolerance'),
        ({"clusters": 3}, "has no setting 'clusters'"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_effattn.patch_attention(model, METHOD, **settings)
        assert not hasattr(model.config, "effattn")


def test_what_compares_approximations_refuses_it() -> None:
    with pytest.raises(ValueError, match="exact approximates nothing, and there are no windows here"):
        bench(methods=[METHOD], lengths=[16])
    with pytest.raises(ValueError, match='"exact" cannot be a candidate'):
        PerHead(candidates=[{"method": METHOD}], heads=[[0]])


@pytest.mark.parametrize("causal", [False, True])
def test_alone_it_is_sdpa(causal: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    torch.testing.assert_close(make_method(METHOD).run(query, key, value, causal=causal), expected)


@pytest.mark.filterwarnings("error::UserWarning")
def test_switched_on_and_saved_it_warns_of_nothing(tmp_path: Path, in_blocks: list[torch.Size]) -> None:
    model = tiny_model("modernbert")
    exact = output(model)
    model.set_attn_implementation(METHOD)
    torch.testing.assert_close(output(model), exact, rtol=0, atol=1e-5)
    hf_effattn.patch_attention(model, METHOD).save_pretrained(tmp_path)
    assert model.config.effattn == {"version": 3, "method": METHOD, "layers": None}
    expected = output(model)
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path).eval()
    by_transformers = AutoModel.from_pretrained(tmp_path, attn_implementation=METHOD).eval()
    assert all(torch.equal(output(patched), expected) for patched in (loaded, by_transformers))
    assert len(in_blocks) == 4
    card = str(model_card(loaded))
    assert "Outputs differ from the exact model's by rounding." in card
    assert "## Settings" not in card
    assert f'A pretrained model that runs by `"{METHOD}"` of hf_effattn' in card


def test_reports_of_models_with_windows_have_it() -> None:
    report = hf_effattn.report(tiny_model("modernbert"), tokens(), repeats=1, memory=False)
    (measured,) = report.of(METHOD)
    assert measured.change.hidden_error is not None
    assert measured.change.hidden_error < 1e-5
    assert {error for heads in measured.attention_error.values() for error in heads} == {0.0}
    assert "exact: nothing is approximated; the last hidden state is off by" in str(report)
    # Of clusters so many on texts so short no method is as near.
    assert report.fastest_within(1e-5) == METHOD
    without_windows = hf_effattn.report(tiny_model("eurobert"), tokens(), repeats=0, memory=False)
    assert METHOD not in without_windows.methods


def test_embedding_measures_short_texts_too_where_windows_gain() -> None:
    model = tiny_model("modernbert")
    window = model.layers[1].attn.sliding_window
    assert is_long_enough(2 * window, model)
    assert not is_long_enough(2 * window - 1, model)
    assert is_long_enough(1, make_model("gpt_oss", layer_types=["full_attention"] * 3))
    assert not is_long_enough(LENGTH, tiny_model("eurobert"))


def test_other_methods_say_that_windows_alone_gain() -> None:
    model = tiny_model("modernbert")
    with pytest.warns(UserWarning, match="approximate nothing, and gain in layers with windows only"):
        hf_effattn.patch_attention(model, "bi-clustered", min_length=100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_effattn.patch_attention(model, METHOD)
