"""The examples in docstrings run as they are printed, on a small local encoder that takes as long inputs."""

import doctest
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from support.embedding_cases import save_encoder, text

import hf_effattn
from hf_effattn import ops
from hf_effattn.embedding import TextEncoder

FUNCTIONS = (
    hf_effattn.patch_attention,
    hf_effattn.unpatch_attention,
    hf_effattn.extend_positions,
    hf_effattn.from_pretrained,
    hf_effattn.measured_error,
    hf_effattn.report,
    hf_effattn.calibrate,
    TextEncoder,
    ops.bi_clustered_attention,
    ops.causal_clustered_attention,
    ops.cluster_queries,
    ops.improved_clustered_attention,
    ops.slice_attention,
)
LENGTH = 4200  # past the shortest that patched models of a CPU approximate
NAMES = "BAAI/bge-m3", "google-bert/bert-base-uncased"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), positions=LENGTH)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_example_gives_what_it_shows(
    function: Callable, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = inspect.getdoc(function)
    assert example is not None
    for name in NAMES:
        example = example.replace(f'"{name}"', repr(str(encoder)))
    for name in ("long.txt", "other.txt"):
        (tmp_path / name).write_text(text(LENGTH - 2, seed=len(name)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(example, {}, function.__name__, None, None)
    assert test.examples
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert result.failed == 0, "".join(said)
