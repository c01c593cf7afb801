"""Patched models of sentence-transformers called again with their own outputs, as guides of losses are."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from support.round_trips import own_memory
from support.sentence_models import HEADS, save_plain, texts
from support.tiny_models import SMALL_SETTINGS

import hf_effattn

SETTINGS: dict[str, dict[str, Any]] = {"bi-clustered": SMALL_SETTINGS["bi-clustered"], "cst": {"slice_length": 4}}


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(attends exactly|passes)")
        yield


def patched(kind: Any, folder: str, method: str = "bi-clustered") -> Any:
    model = kind(folder, device="cpu")
    own_memory(model)
    return hf_effattn.patch_attention(model, method, **SETTINGS[method]).eval()


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_called_with_its_own_outputs_it_gives_them_again(
    kind: Any, method: str, tmp_path: Path, attended: list[str]
) -> None:
    model = patched(kind, save_plain(tmp_path, kind), method)
    read: Any = texts()
    features = model.preprocess([(read[0][:20], text) for text in read] if kind is CrossEncoder else read)
    given = set(features)
    first = {name: value.clone() for name, value in model(features).items() if name not in given}
    layers = len(attended)
    assert first  # the library leaves them in the features
    second = model(features)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value)
    assert set(attended) == {method}
    assert len(attended) == 2 * layers


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


@pytest.mark.compatibility("sentence-transformers", "losses with a guide, cached ones", "runs")
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_run_model_and_guide_by_the_method(
    loss: str, tmp_path: Path, attended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*call: Any) -> None:
        raise AssertionError("a layer is exact")

    folder = save_plain(tmp_path)
    model, guide = patched(SentenceTransformer, folder), patched(SentenceTransformer, folder, "cst")
    monkeypatch.setattr("hf_effattn.patching.interface.attention_function.run_exactly", never)
    features = [model.preprocess(texts()[:3]), model.preprocess(texts()[3:])]
    value = LOSSES[loss](model, guide)(features, None)
    value.backward()
    assert set(attended) == ({"bi-clustered", "cst"} if "GIST" in loss else {"bi-clustered"})
    assert any(bool(parameter.grad is not None and parameter.grad.any()) for parameter in model.parameters())


def test_a_guide_of_mini_batches_says_what_it_says_of_whole_ones(tmp_path: Path) -> None:
    """Called a second time it was another model, whose layers were exact."""
    folder = save_plain(tmp_path)
    model, guide = patched(SentenceTransformer, folder), patched(SentenceTransformer, folder)
    values = []
    for name in ("GISTEmbedLoss", "CachedGISTEmbedLoss"):
        features = [model.preprocess(texts()[:3]), model.preprocess(texts()[3:])]
        values.append(LOSSES[name](model, guide)(features, None).detach())
    torch.testing.assert_close(*values)
