"""What sees for models that read images among their text: every image runs the method by itself."""

import pytest
import torch
from support.tiny_models import APPROXIMATIONS, SMALL_SETTINGS, WITH_TOPK
from support.tiny_towers import GRIDS, TOGETHER, TOWERS, make_tower, pixels, see

import hf_effattn

pytestmark = pytest.mark.usefixtures("without_gradient")
# One of every way in which images are handed over, and in which attention gets them.
KINDS = ("qwen2_vl_vision", "qwen2_5_vl_vision", "video_llama_3_vision", "kimi_k25_vision", "gemma4_vision", "pixtral")
each_tower = pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in TOWERS]
)


def calls_of_a_layer(model_type: str) -> int:
    return 1 if model_type in TOGETHER else len(GRIDS)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual - exact).norm() / exact.norm()).item()


@pytest.mark.slow_except("*-bi-clustered", "qwen2_vl_vision-*")
@pytest.mark.parametrize("method", WITH_TOPK)
@each_tower
def test_the_method_runs_on_every_image_and_is_close_where_topk_is_large(
    model_type: str, method: str, attended: list[str]
) -> None:
    model = make_tower(model_type)
    exact = see(model, pixels(), *GRIDS)
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method] | {"topk": 4})
    coarse = relative_error(see(model, pixels(), *GRIDS), exact)
    assert attended == [method] * 3 * calls_of_a_layer(model_type)
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method] | {"topk": 30})
    fine = relative_error(see(model, pixels(), *GRIDS), exact)
    assert 1e-3 < coarse < 1
    assert 0 < fine < min(0.1, coarse / 2)


@pytest.mark.slow_except("qwen2_vl_vision-*|qwen2_5_vl_vision-bi*|glm4v_vision-bi*|kimi_k25_vision-bi*|hu*-bi*")
@pytest.mark.parametrize("method", APPROXIMATIONS)
@pytest.mark.parametrize("model_type", TOWERS)
def test_no_image_sees_another_small_ones_are_exact_by_default_and_off_is_bit_equal(
    model_type: str, method: str, attended: list[str]
) -> None:
    model = make_tower(model_type)
    config, exact = model.config.to_dict(), see(model, pixels(), *GRIDS)
    hf_effattn.patch_attention(model, method)
    # Pixtral's images are seen without transformers' mask: other bits.
    within = {"rtol": 1e-5, "atol": 1e-4} if model_type == "pixtral" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(see(model, pixels(), *GRIDS), exact, **within)
    assert attended == []
    hf_effattn.patch_attention(model, method, **SMALL_SETTINGS[method])
    together, patches = see(model, pixels(), *GRIDS), pixels()
    assert not torch.equal(together, exact)
    alone = torch.cat([see(model, patches[:36], GRIDS[0]), see(model, patches[36:], GRIDS[1])])
    torch.testing.assert_close(together, alone)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(see(model, pixels(), *GRIDS), exact)
    assert model.config.to_dict() == config
