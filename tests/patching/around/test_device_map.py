"""Models on several devices: accelerate's hooks keep the `forward` of a class, and a patch gives another class."""

from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from support.tiny_exchanged import make_model, output_of
from transformers import PreTrainedModel

import hf_effattn
from hf_effattn.patching.exact.architectures import deberta, longformer, t5_and_mpnet

METHOD, LAYERS = "exact", 3
# Each with the class of its patched attention.
KINDS: dict[str, type] = {
    "t5": t5_and_mpnet.T5ByDistance,
    "mpnet": t5_and_mpnet.MPNetByDistance,
    "deberta-v2": deberta.DebertaV2ByRows,
    "longformer": longformer.LongformerInBlocks,
}
each_kind = pytest.mark.parametrize("kind", KINDS)
pytestmark = [
    pytest.mark.usefixtures("without_gradient"),
    pytest.mark.filterwarnings("ignore:Some parameters are on the meta device"),
]


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    """With the hooks of a device_map around every module, as those on the border of two devices have them."""
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return model


@pytest.fixture
def ran(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for every call of a patched layer."""
    calls: list[None] = []
    module = KINDS[kind]
    forward = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "forward", watched)
    return calls


@pytest.mark.compatibility("accelerate", "`device_map`", "runs")
@pytest.mark.parametrize("removed", [False, True])
@each_kind
def test_a_patch_runs_within_the_hooks_and_when_they_go(kind: str, removed: bool, ran: list[None]) -> None:
    """accelerate then leaves the `forward` that it kept on the module itself."""
    model = make_model(kind)
    exact = output_of(model)
    hf_effattn.patch_attention(hooked(model), METHOD)
    if removed:
        remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(output_of(model), exact, rtol=0, atol=2e-5)
    assert len(ran) == LAYERS
    hf_effattn.unpatch_attention(model)
    assert torch.equal(output_of(model), exact)
    assert len(ran) == LAYERS
    hf_effattn.patch_attention(model, METHOD)
    output_of(model)
    assert len(ran) == 2 * LAYERS


@pytest.mark.parametrize("kind", ["t5", "longformer"])
def test_a_report_leaves_the_hooks_as_they_were(kind: str, ran: list[None]) -> None:
    model = hooked(make_model(kind))
    exact = output_of(model)
    hf_effattn.report(model, {"input_ids": torch.arange(40)[None] + 5}, [METHOD], repeats=1, progress=False)
    assert ran
    calls = len(ran)
    assert torch.equal(output_of(model), exact)
    assert len(ran) == calls


# DeBERTa reads the weights of its distances outside their module, and fails so without a patch.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "deberta-v2"])
def test_weights_that_wait_on_the_cpu(kind: str, ran: list[None]) -> None:
    model = make_model(kind)
    exact = output_of(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    hf_effattn.patch_attention(model, METHOD)
    torch.testing.assert_close(output_of(model), exact, rtol=0, atol=2e-5)
    assert len(ran) == LAYERS
