import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The GPU that these tests are about; `make test-gpu` runs them, `make test` leaves the folder out."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch.cuda.empty_cache()
    return torch.device("cuda")
