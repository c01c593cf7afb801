"""Models on several devices: accelerate's hooks keep the `forward` of a class, and a patch gives another class."""

import warnings
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from transformers import AutoConfig, AutoModel, PreTrainedModel, T5EncoderModel

import hf_effattn
from hf_effattn.patching.exact.architectures import deberta, longformer, t5_and_mpnet

METHOD = "exact"
BERT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.25,
}
T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
# Each with the class of its patched attention.
KINDS: dict[str, tuple[dict[str, Any], type]] = {
    "t5": (T5, t5_and_mpnet.T5ByDistance),
    "mpnet": (BERT, t5_and_mpnet.MPNetByDistance),
    "deberta-v2": (
        BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
        deberta.DebertaV2ByRows,
    ),
    "longformer": (BERT | {"attention_window": 8, "pad_token_id": 1}, longformer.LongformerInBlocks),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="Some parameters are on the meta device")
        yield


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind][0])
    model = T5EncoderModel(config) if kind == "t5" else AutoModel.from_config(config)
    return model.eval()


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    """With the hooks of a device_map around every module, as those on the border of two devices have them."""
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    return model


def output_of(model: PreTrainedModel) -> torch.Tensor:
    """The last hidden state of what is not padding."""
    ids = torch.randint(5, 60, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 50:] = 0
    return model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]


@pytest.fixture
def ran(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for every call of a patched layer."""
    calls: list[None] = []
    own = KINDS[kind][1]
    forward = own.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(own, "forward", watched)
    return calls


@pytest.mark.compatibility("accelerate", "`device_map`", "runs")
@each_kind
def test_a_patch_runs_within_the_hooks(kind: str, ran: list[None]) -> None:
    model = make_model(kind)
    exact = output_of(model)
    hf_effattn.patch_attention(hooked(model), METHOD)
    torch.testing.assert_close(output_of(model), exact, rtol=0, atol=2e-5)
    assert len(ran) == 2
    hf_effattn.unpatch_attention(model)
    assert torch.equal(output_of(model), exact)
    assert len(ran) == 2


@each_kind
def test_hooks_that_go_leave_what_the_patch_says(kind: str, ran: list[None]) -> None:
    """accelerate then leaves the `forward` that it kept on the module itself."""
    model = make_model(kind)
    exact = output_of(model)
    hf_effattn.patch_attention(hooked(model), METHOD)
    remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(output_of(model), exact, rtol=0, atol=2e-5)
    assert len(ran) == 2
    hf_effattn.unpatch_attention(model)
    assert torch.equal(output_of(model), exact)
    assert len(ran) == 2
    hf_effattn.patch_attention(model, METHOD)
    output_of(model)
    assert len(ran) == 4


@each_kind
def test_a_report_leaves_the_hooks_as_they_were(kind: str, ran: list[None]) -> None:
    model = hooked(make_model(kind))
    exact = output_of(model)
    hf_effattn.report(model, {"input_ids": torch.arange(70)[None] % 50 + 5}, [METHOD], repeats=1, progress=False)
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
    assert len(ran) == 2
