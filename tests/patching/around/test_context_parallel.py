"""A method would attend to each part of a text that is divided by tokens: refused at the patch, or at a call."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from support.tiny_decoders import make_model
from support.tiny_models import SMALL_SETTINGS, batch_for, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_effattn

METHOD = "bi-clustered"


def patched(model: PreTrainedModel) -> PreTrainedModel:
    settings = {"min_length": 0} if model.config.model_type == "llama" else SMALL_SETTINGS[METHOD]
    return hf_effattn.patch_attention(model, METHOD, **settings)


def assert_refused(call: Callable[[], Any], who: str) -> None:
    said = rf'{who}, and "{METHOD}" would .* Divide the heads instead: hf_effattn.parallelize.* unpatch_attention'
    with pytest.raises(ValueError, match=said):
        call()


@pytest.fixture
def ulysses() -> Iterator[Callable[[], None]]:
    """Puts a function that says it is DeepSpeed's in the place of all, as `ulysses_sp` does it, ours among them."""
    names = list(ALL_ATTENTION_FUNCTIONS)

    def register() -> None:
        def uattn_wrapper(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("a text was attended to")

        uattn_wrapper.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
        for name in names:
            ALL_ATTENTION_FUNCTIONS[name] = uattn_wrapper

    yield register
    for name in names:
        del ALL_ATTENTION_FUNCTIONS[name]


def test_ulysses_is_refused_at_the_patch_and_nothing_changes(ulysses: Callable[[], None]) -> None:
    model = tiny_model("bert")
    ulysses()
    assert_refused(lambda: patched(model), "DeepSpeed's Ulysses has taken the place of .* by tokens")
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "effattn")


@pytest.mark.parametrize("padding", ["right", None])
def test_ulysses_after_the_patch_is_refused_at_the_call(ulysses: Callable[[], None], padding: str | None) -> None:
    """It has taken the place of our attention function, too."""
    model = patched(tiny_model("bert"))
    batch = batch_for(model, padding=padding)
    model(**batch.inputs)
    ulysses()
    assert_refused(lambda: model(**batch.inputs), "DeepSpeed's Ulysses .* by tokens")
    unpatched = hf_effattn.unpatch_attention(model)
    with pytest.raises(AssertionError, match="a text was attended to"):  # by DeepSpeed, which the model now calls
        unpatched(**batch.inputs)


@pytest.mark.compatibility("accelerate", "context parallelism, whose hooks drop masks", "refused")
@pytest.mark.parametrize("order", ["hooks first", "patch first"])
def test_hooks_of_accelerate_that_drop_masks_are_refused(order: str) -> None:
    model = make_model("llama")
    if order == "patch first":
        patched(model)
    _attach_context_parallel_hooks(model)
    call = (lambda: patched(model)) if order == "hooks first" else (lambda: model(input_ids=torch.arange(2, 30)[None]))
    assert_refused(call, "accelerate's context parallelism divides texts by tokens and drops attention masks")
    assert model.config._attn_implementation == ("sdpa" if order == "hooks first" else METHOD)


@pytest.mark.compatibility("torch", "`context_parallel`", "refused")
@pytest.mark.usefixtures("one_process")
def test_context_parallelism_of_torch_is_refused_while_it_is_on() -> None:
    model = patched(tiny_model("roberta"))
    inputs = batch_for(model).inputs
    expected = model(**inputs).last_hidden_state
    with context_parallel(init_device_mesh("cpu", (1,)), buffers=[inputs["input_ids"]], buffer_seq_dims=[1]):
        assert_refused(lambda: model(**inputs), "torch's context parallelism divides texts by tokens")
        assert_refused(lambda: patched(tiny_model("bert")), "torch's context parallelism divides texts by tokens")
    assert torch.equal(model(**inputs).last_hidden_state, expected)
