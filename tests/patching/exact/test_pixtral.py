"""Pixtral, whose images transformers reads as one sequence under a mask: in groups, each image by itself."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.pixtral import modeling_pixtral

import hf_effattn
from hf_effattn.patching.exact.architectures import pixtral

EXACTLY = "exact"
FEW: dict[str, Any] = {"clusters": 6, "topk": 8, "key_clusters": 7, "min_length": 0}
LAYERS = 3
VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "image_size": 64,
    "initializer_range": 0.2,
}
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "head_dim": 16,
    "initializer_range": 0.2,
}
TOGETHER: dict[str, dict[str, Any]] = {
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "image_token_index": 50, "spatial_merge_size": 2},
    "lighton_ocr": {"text_config": TEXT | {"model_type": "qwen3"}, "image_token_id": 50, "spatial_merge_size": 2},
    "llava": {
        "text_config": TEXT | {"model_type": "mistral"},
        "image_token_index": 50,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "full",
    },
}
# Height and width in pixels; 48, 16, 8, 64 and 6 patches.
SIZES = [(32, 24), (16, 16), (8, 16), (32, 32), (12, 8)]
PATCHES = [48, 16, 8, 64, 6]


def make_tower() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(**VISION)).eval()


def images(count: int = len(SIZES)) -> dict[str, Any]:
    """Images, of which what is beyond their sizes is not 0."""
    drawn = torch.randn(len(SIZES), 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": drawn[:count], "image_sizes": torch.tensor(SIZES[:count])}


@pytest.fixture(params=[4096, 70, 1], ids=["one group", "three groups", "one each"])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The patches of the images of every group, by a limit of so many."""
    monkeypatch.setattr(pixtral, "GROUP", request.param)
    expected = {4096: [PATCHES], 70: [[48, 16], [8], [64, 6]], 1: [[one] for one in PATCHES]}
    return expected[request.param]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The patches of the images of every mask that transformers makes."""
    made: list[list[int]] = []
    generate = modeling_pixtral.generate_block_attention_mask

    def watched(patches: list[int], hidden: torch.Tensor) -> torch.Tensor:
        made.append(list(patches))
        return generate(patches, hidden)

    monkeypatch.setattr(modeling_pixtral, "generate_block_attention_mask", watched)
    return made


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The queries of every call of SDPA, and whether it had a mask."""
    calls: list[tuple[int, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query: torch.Tensor, *args: torch.Tensor, attn_mask: Any = None, **how: Any) -> torch.Tensor:
        calls.append((query.shape[2], attn_mask is not None))
        return attend(query, *args, attn_mask=attn_mask, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return calls


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_all_that_is_asked_for(
    groups: list[list[int]], masks: list[list[int]], attended: list[tuple[int, bool]]
) -> None:
    model, inputs = make_tower(), images()
    exact = model(**inputs, output_hidden_states=True)
    assert (masks, attended) == ([PATCHES], [(142, True)] * LAYERS)
    masks.clear()
    attended.clear()
    hf_effattn.patch_attention(model, EXACTLY)
    found = model(**inputs, output_hidden_states=True)
    assert masks == groups
    assert sorted(attended) == sorted((patches, False) for patches in PATCHES * LAYERS)
    assert type(found) is type(exact)
    assert_close(found.last_hidden_state, exact.last_hidden_state)
    assert len(found.hidden_states) == LAYERS + 1
    for one, other in zip(found.hidden_states, exact.hidden_states, strict=True):
        assert_close(one, other)
    (last,) = model(**inputs, return_dict=False)
    assert torch.equal(last, found.last_hidden_state)
    hf_effattn.unpatch_attention(model)
    assert type(model) is modeling_pixtral.PixtralVisionModel
    assert torch.equal(model(**inputs).last_hidden_state, exact.last_hidden_state)


@torch.no_grad()
def test_attention_weights(groups: list[list[int]]) -> None:
    """Those of each image along the diagonal, by whatever ran."""
    model, inputs = make_tower(), images()
    model.set_attn_implementation("eager")
    exact = model(**inputs, output_attentions=True).attentions
    hf_effattn.patch_attention(model, EXACTLY)
    found = model(**inputs, output_attentions=True).attentions
    assert len(found) == LAYERS
    for one, other in zip(found, exact, strict=True):
        assert_close(one, other)
    hf_effattn.patch_attention(model, "bi-clustered", **FEW)
    approximate = model(**inputs, output_attentions=True).attentions[0]
    seen = torch.block_diag(*(torch.ones(patches, patches) for patches in PATCHES))
    assert not approximate[:, :, seen == 0].any()
    assert 1e-3 < (approximate - exact[0]).abs().max() < 0.9


@torch.no_grad()
def test_images_without_sizes_are_whole(groups: list[list[int]]) -> None:
    model, pixels = make_tower(), images()["pixel_values"]
    exact = model(pixels).last_hidden_state
    hf_effattn.patch_attention(model, EXACTLY)
    assert_close(model(pixels).last_hidden_state, exact)
    assert exact.shape == (1, 5 * 64, 32)


def test_gradients(groups: list[list[int]]) -> None:
    """Also by gradient checkpointing."""

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        last = model(**images()).last_hidden_state
        (last * torch.linspace(-1, 1, last.shape[2])).sum().backward()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    model = make_tower()
    expected = gradients()
    hf_effattn.patch_attention(model, EXACTLY).train()
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        found = gradients()
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3, msg=lambda it, at=name: at + it)


@torch.no_grad()
def test_bfloat16_is_as_near_as_transformers() -> None:
    inputs = images()
    exact = make_tower()(**inputs).last_hidden_state
    model = make_tower().bfloat16()
    by_transformers = model(**inputs).last_hidden_state
    found = hf_effattn.patch_attention(model, EXACTLY)(**inputs).last_hidden_state
    assert found.dtype == torch.bfloat16
    error, usual = ((one.float() - exact).norm() for one in (found, by_transformers))
    assert error <= 1.1 * usual


@torch.no_grad()
def test_copied_and_pickled() -> None:
    model, inputs = hf_effattn.patch_attention(make_tower(), "bi-clustered", **FEW), images()
    expected = model(**inputs).last_hidden_state
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is pixtral.PixtralVisionModel
        assert torch.equal(copied(**inputs).last_hidden_state, expected)


@torch.no_grad()
def test_compiled() -> None:
    model, inputs = hf_effattn.patch_attention(make_tower(), EXACTLY), images(2)
    expected = model(**inputs).last_hidden_state
    compiled = torch.compile(model, backend="eager")
    assert_close(compiled(**inputs).last_hidden_state, expected)


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    model, inputs = hf_effattn.patch_attention(make_tower(), EXACTLY), images()
    expected = model(**inputs).last_hidden_state
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["PixtralVisionModel"]
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path)
    assert type(loaded) is pixtral.PixtralVisionModel
    assert torch.equal(loaded(**inputs).last_hidden_state, expected)
    assert type(AutoModel.from_pretrained(tmp_path)) is modeling_pixtral.PixtralVisionModel


@torch.no_grad()
def test_the_switch_of_transformers_keeps_its_mask(masks: list[list[int]]) -> None:
    """It changes no class: images stay apart, exactly."""
    model, inputs = make_tower(), images()
    exact = model(**inputs).last_hidden_state
    model.set_attn_implementation("bi-clustered")
    assert torch.equal(model(**inputs).last_hidden_state, exact)
    assert masks == [PATCHES] * 2
    hf_effattn.patch_attention(model, "bi-clustered", **FEW)
    approximate = model(**inputs).last_hidden_state
    for own in ("sdpa", "eager"):  # of a patched model, whose class stays
        model.set_attn_implementation(own)
        assert_close(model(**inputs).last_hidden_state, exact)
    model.set_attn_implementation("bi-clustered")
    assert torch.equal(model(**inputs).last_hidden_state, approximate)


@torch.no_grad()
def test_a_report_measures_the_first_image(masks: list[list[int]]) -> None:
    model, inputs = make_tower(), images()
    before = model(**inputs).last_hidden_state
    masks.clear()
    found = hf_effattn.report(model, inputs, [EXACTLY, {"method": "bi-clustered", **FEW}], repeats=1, progress=False)
    assert found.inputs[0].length == PATCHES[0]
    exactly, approximately = found.measurements[1:]
    assert max(max(errors) for errors in exactly.attention_error.values()) < 1e-5
    assert all(1e-3 < max(errors) < 1 for errors in approximately.attention_error.values())
    assert exactly.change.hidden_error < 1e-5 < approximately.change.hidden_error
    assert type(model) is modeling_pixtral.PixtralVisionModel
    assert torch.equal(model(**inputs).last_hidden_state, before)
    default = hf_effattn.report(model, inputs, repeats=1, progress=False)
    assert EXACTLY in {settings["method"] for settings in default.methods.values()}


@pytest.mark.parametrize("model_type", TOGETHER)
@torch.no_grad()
def test_within_a_model_that_reads_text(model_type: str, tmp_path: Path, masks: list[list[int]]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vision_config=VISION, **TOGETHER[model_type])
    model = AutoModelForImageTextToText.from_config(config).eval()
    inputs = images(2)
    patches = sum(PATCHES[:2]) // (1 if model_type == "llava" else 4)
    inputs["input_ids"] = torch.randint(5, 45, (1, 90), generator=torch.Generator().manual_seed(1))
    inputs["input_ids"][0, 10 : 10 + patches] = 50
    exact = model(**inputs).logits
    hf_effattn.patch_attention(model, EXACTLY)
    assert_close(model(**inputs).logits, exact)
    hf_effattn.patch_attention(model, "bi-clustered", **FEW)
    approximate = model(**inputs).logits
    assert (approximate - exact).abs().max() > 1e-3
    written = model.generate(**inputs, do_sample=False, max_new_tokens=3, eos_token_id=10**6)
    assert written.shape == (1, 93)
    model.save_pretrained(tmp_path)
    loaded = hf_effattn.from_pretrained(AutoModelForImageTextToText, tmp_path)
    assert torch.equal(loaded(**inputs).logits, approximate)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(model(**inputs).logits, exact)


@torch.no_grad()
def test_within_the_hooks_of_a_device_map(masks: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixtral, "GROUP", 1)
    model, inputs = make_tower(), images()
    exact = model(**inputs).last_hidden_state
    masks.clear()
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    hf_effattn.patch_attention(model, EXACTLY)
    assert_close(model(**inputs).last_hidden_state, exact)
    assert masks == [[one] for one in PATCHES]
