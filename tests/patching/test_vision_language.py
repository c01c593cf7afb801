"""Models that read images among their text: their decoder is patched, its positions those of the images, too."""

from typing import Any

import pytest
import torch
from support.tiny_vision_language import MODELS, image_and_text, make_model

import hf_effattn
from hf_effattn.patching.methods import clustered as clustered_settings
from hf_effattn.patching.model_types import find_stacks

SMALL: dict[str, Any] = {"clusters": 4, "segment_length": 4, "key_clusters": 6, "min_length": 0}
each_model = pytest.mark.parametrize("model_type", MODELS)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call of the causal op."""
    seen: list[int] = []
    run = clustered_settings.causal_clustered_attention

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return run(query, *args, **kwargs)

    monkeypatch.setattr(clustered_settings, "causal_clustered_attention", counted)
    return seen


@each_model
@torch.no_grad()
def test_a_window_over_all_is_the_exact_model(model_type: str, lengths: list[int]) -> None:
    model, inputs = make_model(model_type), image_and_text()
    exact = model(**inputs).logits
    assert [stack.model.config.model_type for stack in find_stacks(model)] == [f"{model_type}_text"]
    hf_effattn.patch_attention(model, "bi-clustered", topk=59, window=44, **SMALL)
    torch.testing.assert_close(model(**inputs).logits, exact, rtol=0, atol=1e-5)
    assert lengths == [60] * 3
    hf_effattn.unpatch_attention(model)
    assert torch.equal(model(**inputs).logits, exact)


@each_model
@torch.no_grad()
def test_no_logit_sees_a_later_token(model_type: str, lengths: list[int]) -> None:
    model, inputs = make_model(model_type), image_and_text()
    exact = model(**inputs).logits
    hf_effattn.patch_attention(model, "bi-clustered", topk=1, window=4, **SMALL)
    before = model(**inputs).logits
    assert (before - exact).abs().max() > 0.1
    changed = inputs | {"input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 40] = 7
    after = model(**changed).logits
    # Of experts, how many tokens one reads tells the last bits of the others in a product.
    close = 1e-5 if model_type.endswith("moe") else 0.0
    torch.testing.assert_close(after[:, :40], before[:, :40], rtol=0, atol=close)
    assert (after[:, 40] - before[:, 40]).abs().max() > 0.1
    assert lengths == [60] * 6


@pytest.mark.slow_except("qwen2_5_vl")
@each_model
@torch.no_grad()
def test_generation(model_type: str, lengths: list[int]) -> None:
    """The prompt runs by the method, every step after it exactly over the keys of the cache."""
    model, inputs = make_model(model_type), image_and_text()
    hf_effattn.patch_attention(model, "bi-clustered", topk=1, window=4, **SMALL)
    first = model(**inputs).logits[0, -1].argmax()
    written = model.generate(**inputs, do_sample=False, max_new_tokens=4, eos_token_id=10**6)
    assert written[0, 60] == first
    assert lengths == [60] * 6
