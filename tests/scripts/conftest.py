"""Folders that the scripts look into."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.stored_results import keeper

from scripts.shared import data as shared_data


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder where the data sets are looked up."""
    folder = tmp_path / "data"
    monkeypatch.setenv(shared_data.VARIABLE, str(folder))
    return folder


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a file of results where the published tables look for it."""
    return keeper(tmp_path, monkeypatch)
