"""Models that read images among their text: the decoder, its positions those of the images, too, and what sees."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_vision_language import MODELS, image_and_text, make_model
from transformers import AutoModelForImageTextToText

import hf_effattn
from hf_effattn.patching.methods import METHODS
from hf_effattn.patching.model_types.stacks import find_stacks, is_causal

SMALL: dict[str, Any] = {"segment_length": 4, "key_clusters": 3, "min_length": 0}
FAST = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mllama")  # the others differ in projections and experts


def each_of(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "model_type", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]
    )


each_model = each_of(MODELS)
each_decoder = each_of((*MODELS, "mllama"))


def decoder_of(model: Any) -> Any:
    return next(stack.model for stack in find_stacks(model) if is_causal(stack.modules[0]))


def tower_of(model: Any) -> Any:
    return next(stack.model for stack in find_stacks(model) if not is_causal(stack.modules[0]))


@each_decoder
@torch.no_grad()
def test_a_window_over_all_is_the_exact_model_and_no_logit_sees_a_later_token(
    model_type: str, lengths: list[int]
) -> None:
    model, inputs = make_model(model_type), image_and_text(model_type)
    exact = model(**inputs).logits
    blind = model(**inputs | {"pixel_values": torch.zeros_like(inputs["pixel_values"])}).logits
    assert (exact - blind).abs().max() > 1e-3
    hf_effattn.patch_attention(decoder_of(model), "bi-clustered", exact_keys=59, window=44, **SMALL)
    torch.testing.assert_close(model(**inputs).logits, exact, rtol=0, atol=1e-5)
    hf_effattn.patch_attention(decoder_of(model), "bi-clustered", exact_keys=6, window=4, **SMALL)
    before = model(**inputs).logits
    assert (before - exact).abs().max() > 0.1
    changed = inputs | {"input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 40] = 7
    after = model(**changed).logits
    # Of experts, how many tokens one reads tells the last bits of the others in a product.
    close = 1e-5 if model_type.endswith("moe") else 0.0
    torch.testing.assert_close(after[:, :40], before[:, :40], rtol=0, atol=close)
    assert (after[:, 40] - before[:, 40]).abs().max() > 0.1
    assert lengths == [60] * 9
    hf_effattn.unpatch_attention(model)
    assert torch.equal(model(**inputs).logits, exact)


def test_layers_that_attend_to_images_alone_keep_their_numbers() -> None:
    model = make_model("mllama")
    (stack,) = find_stacks(model)
    assert stack.layers == ((0,), (2,), (3,))
    assert stack.depth == 4
    with pytest.raises(ValueError, match=r"layer 1 of MllamaTextModel has no attention; .* are \[0, 2, 3\]"):
        hf_effattn.patch_attention(model, "bi-clustered", layers=[1])


@pytest.mark.slow_except("qwen2_5_vl", "mllama")
@each_decoder
@torch.no_grad()
def test_generation(model_type: str, lengths: list[int]) -> None:
    """The prompt runs by the method, every step after it exactly over the keys of the cache."""
    model, inputs = make_model(model_type), image_and_text(model_type)
    hf_effattn.patch_attention(model, "bi-clustered", exact_keys=6, window=4, **SMALL)
    first = model(**inputs).logits[0, -1].argmax()
    written = model.generate(**inputs, do_sample=False, max_new_tokens=4, eos_token_id=10**6)
    assert written[0, 60] == first
    assert lengths == [60] * 6


# Enough patches in two images that the settings leave something out.
IMAGES: dict[str, Any] = {"sides": (12, 16)}
FEW: dict[str, Any] = SMALL | {"exact_keys": 12, "window": 4}
OF_IMAGES: dict[str, Any] = {"clusters": 4, "topk": 2, "key_clusters": 6, "min_length": 0}
# Of two layers; the first of the one sees windows of an image.
WHOLE = {"qwen2_5_vl": [144, 256]}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The patches of every image that an encoder attended to by bi-clustered attention."""
    patches: list[int] = []
    method = METHODS["bi-clustered"]
    attend = method.attend

    def counted(self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        patches.append(query.shape[2])
        return attend(self, query, *args, **kwargs)

    monkeypatch.setattr(method, "attend", counted)
    return patches


@each_model
@torch.no_grad()
def test_both_parts_run_the_method_saved_and_loaded(
    model_type: str, tmp_path: Path, lengths: list[int], seen: list[int]
) -> None:
    model, inputs = make_model(model_type), image_and_text(model_type, 200, **IMAGES)
    exact = model(**inputs).logits
    hf_effattn.patch_attention(tower_of(model), "bi-clustered", **OF_IMAGES | {"seed": 1})
    hf_effattn.patch_attention(decoder_of(model), "bi-clustered", **FEW)
    patched = model(**inputs).logits
    assert (patched - exact).abs().max() > 1e-3
    assert (lengths, seen) == ([200] * 3, WHOLE.get(model_type, [144, 256] * 2))
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModelForImageTextToText, tmp_path, experts_implementation="eager").eval()
    assert torch.equal(loaded(**inputs).logits, patched)
    assert (tower_of(loaded).config.effattn["seed"], decoder_of(loaded).config.effattn["seed"]) == (1, 0)
    assert torch.equal(hf_effattn.unpatch_attention(model)(**inputs).logits, exact)


@pytest.mark.slow_except("qwen2_5_vl")
@each_model
@torch.no_grad()
def test_a_part_is_calibrated_and_patched_alone(model_type: str, lengths: list[int], seen: list[int]) -> None:
    model, inputs = make_model(model_type), image_and_text(model_type, 200, **IMAGES)
    with pytest.raises(ValueError, match=r"calibrate one: part=model\.model\.\w+, part=model\.model\.\w+$"):
        hf_effattn.calibrate(model, inputs, min_length=0)
    candidates = [
        {"method": "bi-clustered", **OF_IMAGES, "topk": topk, "max_predicted_error": None} for topk in (2, 8)
    ]
    for texts in (1, 2):
        calibration = hf_effattn.calibrate(model, [inputs] * texts, 10.0, candidates=candidates, part=tower_of(model))
        about = calibration.settings.calibration
        assert about is not None
        assert (about["texts"], about["lengths"]) == (2 * texts, [144, 256])  # every image counts
    with pytest.raises(ValueError, match=r"two texts or more, .* got 1;"):
        hf_effattn.calibrate(
            model, image_and_text(model_type, 200, (12,)), candidates=candidates, part=tower_of(model)
        )
    lengths.clear()
    seen.clear()
    hf_effattn.patch_attention(model, settings=calibration)
    model(**inputs)
    assert (lengths, seen) == ([], WHOLE.get(model_type, [144, 256] * 2))
    # A text model that sees both ways would take settings of the same kind.
    config = decoder_of(hf_effattn.unpatch_attention(model)).config
    config.is_causal = False
    hf_effattn.patch_attention(model, settings=calibration)
    assert not hasattr(config, "effattn")


@torch.no_grad()
def test_a_part_that_the_inputs_do_not_reach() -> None:
    model = make_model("qwen3_vl")
    text = {"input_ids": torch.randint(5, 45, (2, 60))}
    with pytest.raises(ValueError, match="do not reach Qwen3VLVisionModel"):
        hf_effattn.calibrate(model, text, part=model.model.visual, min_length=0)
    with pytest.raises(ValueError, match="part must be a module of the model"):
        hf_effattn.calibrate(model, text, part=make_model("qwen3_vl").model.visual)


def test_a_report_of_both_parts() -> None:
    model, inputs = make_model("qwen3_vl"), image_and_text("qwen3_vl", 200, **IMAGES)
    methods = [{"method": "bi-clustered", **counts} for counts in (OF_IMAGES, FEW)]
    report = hf_effattn.report(model, inputs, methods, repeats=1, memory=False)
    assert next(iter(report.layers.values())) == "model.visual.blocks.0.attn"
    assert report.inputs[0].encoder_lengths == {"model.visual": 144, "model.language_model": 200}
    of_parts = [[0, 1], [2, 3, 4]]
    for measured, layers in zip(report.measurements[1:], of_parts, strict=True):
        errors = measured.attention_error
        assert sorted(errors) == [0, 1, 2, 3, 4]
        assert [layer for layer, of_layer in errors.items() if torch.as_tensor(of_layer).max() > 0] == layers


def test_each_part_gets_the_settings_of_its_kind(tmp_path: Path) -> None:
    model = hf_effattn.patch_attention(make_model("qwen3_vl"), "bi-clustered", min_length=0)
    kept = [part(model).config.effattn for part in (tower_of, decoder_of)]
    assert [(settings.get("causal"), settings.get("topk"), settings.get("exact_keys")) for settings in kept] == [
        (None, 64, None),
        (True, None, 384),
    ]
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModelForImageTextToText, tmp_path)
    assert [part(loaded).config.effattn for part in (tower_of, decoder_of)] == kept
    # Settings that only one kind has are for its parts alone.
    for counts, part, other in (({"topk": 8}, tower_of, decoder_of), ({"exact_keys": 8}, decoder_of, tower_of)):
        model = hf_effattn.patch_attention(make_model("qwen3_vl"), "bi-clustered", min_length=0, **counts)
        assert part(model).config.effattn | counts == part(model).config.effattn
        assert not hasattr(other(model).config, "effattn")
    with pytest.raises(ValueError, match="has no setting 'colour'"):
        hf_effattn.patch_attention(model, "bi-clustered", colour=8)
