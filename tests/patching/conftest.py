"""Shared by the tests of patching."""

from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
from packaging.version import parse
from transformers.integrations import peft as adapters

from hf_effattn.patching.exact import call
from hf_effattn.patching.exact.architectures import longformer
from hf_effattn.patching.exact.windows import attend_in_blocks
from hf_effattn.patching.methods import METHODS
from hf_effattn.patching.methods import causal as causal_settings
from hf_effattn.patching.methods.causal import CausalMethod


@pytest.fixture
def on_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads for the time of a test."""
    kept = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(kept)


@pytest.fixture
def without_gradient() -> Iterator[None]:
    """For files whose tests only look at outputs: `pytestmark = pytest.mark.usefixtures("without_gradient")`."""
    with torch.no_grad():
        yield


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of one, for wrappers of models that divide them among processes."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that really ran, one entry per call of a method by an attention module."""
    calls: list[str] = []

    def counting(name: str, attend: Any) -> Any:
        def counted(method: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(type(method), name) is counted:  # not where a method goes on to that of another
                calls.append(method.method)
            return attend(method, *args, **kwargs)

        return counted

    for kind in (*METHODS.values(), CausalMethod):
        for name in ("attend", "attend_causal"):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, counting(name, getattr(kind, name)))
    return calls


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call of the causal op."""
    seen: list[int] = []
    run = causal_settings.causal_clustered_attention

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return run(query, *args, **kwargs)

    monkeypatch.setattr(causal_settings, "causal_clustered_attention", counted)
    return seen


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the masks that attention in blocks was called with."""
    shapes: list[torch.Size] = []

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **how: Any) -> Any:
        shapes.append(mask.shape)
        return attend_in_blocks(query, key, value, mask, **how)

    for module in (call, longformer):
        monkeypatch.setattr(module, "attend_in_blocks", watched)
    return shapes


@pytest.fixture
def newest_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of `add_adapter`: transformers 5.24 asks for PEFT 0.22, which is not out; what it calls is in 0.21."""
    if parse(peft.__version__) < parse(adapters.MIN_PEFT_VERSION):
        monkeypatch.setattr(adapters, "MIN_PEFT_VERSION", peft.__version__)
