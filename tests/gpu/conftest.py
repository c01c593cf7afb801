import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The GPU that these tests are about; `make test-gpu` runs them, `make test` leaves the folder out."""
    if not torch.cuda.is_available():
        pytest.fail("there is no GPU: a run of these tests without one must not look like a pass")
    torch.cuda.empty_cache()
    return torch.device("cuda")
