from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """`torch.empty` and its kin hand out NaN or a huge number, so that an output nobody wrote shows."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype in (torch.int32, torch.int64):
                return tensor.fill_(2**30)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def two_threads() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(kept)
