"""Shared by the tests of patching."""

from typing import Any

import pytest

from hf_effattn.patching import attention


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that really ran, one entry per call of a method by an attention module."""
    calls: list[str] = []
    attend = attention.attend

    def counted(settings: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(settings.method)
        return attend(settings, *args, **kwargs)

    monkeypatch.setattr(attention, "attend", counted)
    return calls
