"""Hands the numbers of cases over to `make fuzz`."""

import json
import os
from pathlib import Path

import pytest
from support.properties import CASES, COUNTS


def pytest_sessionfinish(session: pytest.Session) -> None:
    if COUNTS in os.environ:
        Path(os.environ[COUNTS]).write_text(json.dumps(CASES), encoding="utf-8")
