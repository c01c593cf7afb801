"""Pixtral, whose images transformers reads as one sequence under a mask: in groups, each image by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_decoders import GROUPED
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.pixtral import modeling_pixtral

import hf_effattn
from hf_effattn.patching.exact.architectures import pixtral

from .contract import METHOD, Kind, Near, record

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
TEXT = GROUPED | {"num_hidden_layers": 2}
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


def make_tower(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(**VISION | changes)).eval()


def images(count: int = len(SIZES)) -> dict[str, torch.Tensor]:
    """Images, of which what is beyond their sizes is not 0."""
    drawn = torch.randn(len(SIZES), 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": drawn[:count], "image_sizes": torch.tensor(SIZES[:count])}


GROUPS = {
    "one group": (4096, [PATCHES]),
    "three groups": (70, [[48, 16], [8], [64, 6]]),
    "one each": (1, [[image] for image in PATCHES]),
}


@pytest.fixture(params=GROUPS)
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The patches of the images of every group, by a limit of so many."""
    limit, patches = GROUPS[request.param]
    monkeypatch.setattr(pixtral, "GROUP", limit)
    return patches


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


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    output = model(**inputs, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    return (*output.hidden_states, output.last_hidden_state)


def query_and_mask(query: torch.Tensor, *_: torch.Tensor, attn_mask: Any = None, **__: Any) -> tuple[int, bool]:
    return query.shape[2], attn_mask is not None


def check_images(calls: list[tuple[int, bool]], _: Any) -> None:
    """Each image is seen by itself, without a mask."""
    assert sorted(calls) == sorted((patches, False) for patches in PATCHES * LAYERS)


def weigh(model: Any) -> list[torch.Tensor]:
    """Those of each image along the diagonal."""
    weights = model(**images(), output_attentions=True).attentions
    assert len(weights) == LAYERS
    return weights


ONCE: dict[str, Any] = {"auto": AutoModel, "low_precision": 1.1, "compiled": "eager"}
ONCE["compiled_as"] = {"num_hidden_layers": 1}
KINDS = [
    Kind(
        f"pixtral, {name}",
        make_tower,
        images,
        encoded,
        frozenset({pixtral.PixtralVisionModel}),
        near=Near(rtol=1e-5, atol=2e-5),
        slopes=Near(rtol=1e-3, atol=1e-3),
        cases={"images": {}},
        constants=((pixtral, "GROUP", limit),),
        recorded=query_and_mask,
        ran=check_images,
        unpatched=True,
        weigh=weigh,
        weights_near=Near(rtol=1e-5, atol=2e-5),
        eager=True,
        retrained=Near(atol=1e-5),
        **(ONCE if name == "one group" else {}),
    )
    for name, (limit, _) in GROUPS.items()
]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_each_group_has_a_mask_and_outputs_are_transformers(
    groups: list[list[int]], masks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, calls = make_tower(), images(), record(monkeypatch, recorded=query_and_mask)
    exact = model(**inputs)
    assert (masks, calls) == ([PATCHES], [(142, True)] * LAYERS)
    masks.clear()
    hf_effattn.patch_attention(model, METHOD)
    output = model(**inputs)
    assert masks == groups
    assert type(output) is type(exact)
    (last,) = model(**inputs, return_dict=False)
    assert torch.equal(last, output.last_hidden_state)


@torch.no_grad()
def test_weights_of_a_method_are_of_each_image_alone(groups: list[list[int]]) -> None:
    model = make_tower()
    model.set_attn_implementation("eager")
    exact = weigh(model)[0]
    hf_effattn.patch_attention(model, "bi-clustered", **FEW)
    approximate = weigh(model)[0]
    seen = torch.block_diag(*(torch.ones(patches, patches) for patches in PATCHES))
    assert not approximate[:, :, seen == 0].any()
    assert 1e-3 < (approximate - exact).abs().max() < 0.9


@torch.no_grad()
def test_images_without_sizes_are_whole(groups: list[list[int]]) -> None:
    model, pixels = make_tower(), images()["pixel_values"]
    exact = model(pixels).last_hidden_state
    hf_effattn.patch_attention(model, METHOD)
    assert_close(model(pixels).last_hidden_state, exact)
    assert exact.shape == (1, 5 * 64, 32)


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
    for name in ("sdpa", "eager"):  # of a patched model, whose class stays
        model.set_attn_implementation(name)
        assert_close(model(**inputs).last_hidden_state, exact)
    model.set_attn_implementation("bi-clustered")
    assert torch.equal(model(**inputs).last_hidden_state, approximate)


@pytest.mark.slow
@torch.no_grad()
def test_a_report_measures_the_first_image(masks: list[list[int]]) -> None:
    model, inputs = make_tower(), images()
    before = model(**inputs).last_hidden_state
    masks.clear()
    report = hf_effattn.report(model, inputs, [METHOD, {"method": "bi-clustered", **FEW}], repeats=1, progress=False)
    assert report.inputs[0].length == PATCHES[0]
    exactly, approximately = report.measurements[1:]
    assert max(max(errors) for errors in exactly.attention_error.values()) < 1e-5
    assert all(1e-3 < max(errors) < 1 for errors in approximately.attention_error.values())
    assert exactly.change.hidden_error < 1e-5 < approximately.change.hidden_error
    assert type(model) is modeling_pixtral.PixtralVisionModel
    assert torch.equal(model(**inputs).last_hidden_state, before)
    default = hf_effattn.report(model, inputs, repeats=1, progress=False)
    assert METHOD in {settings["method"] for settings in default.methods.values()}


@pytest.mark.slow_except("mistral3")
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
    hf_effattn.patch_attention(model, METHOD)
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
