"""The format in which a model of this package writes its configuration, and what is read of other formats."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import clusterformer_cases, cst_models
from transformers import AutoConfig, AutoModelForCausalLM

from hf_effattn.models.stored_config import FIELD, FORMAT_VERSION


@pytest.fixture(params=[cst_models, clusterformer_cases], ids=["cst", "clusterformer"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The `config.json` of a small model that is saved beside it."""
    AutoModelForCausalLM.from_config(request.param.tiny_config()).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def rewrite(file: Path, **fields: Any) -> None:
    """Change fields of a config; None takes one away."""
    changed = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


def said_while_loading(file: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        AutoModelForCausalLM.from_pretrained(file.parent, num_labels=3)
    return [str(warning.message) for warning in seen if "hf_effattn" in str(warning.message)]


def test_the_format_is_written_and_read(file: Path) -> None:
    assert json.loads(file.read_text())[FIELD] == FORMAT_VERSION
    assert said_while_loading(file) == []


def test_a_file_without_format(file: Path) -> None:
    rewrite(file, **{FIELD: None})
    assert said_while_loading(file) == []


def test_unknown_fields_of_a_newer_format_are_named(file: Path) -> None:
    rewrite(file, **{FIELD: FORMAT_VERSION + 1, "tomorrow": 3, "also_tomorrow": [1], "auto_map": {}})
    (said,) = said_while_loading(file)
    assert (
        f"written by a newer hf_effattn (format {FORMAT_VERSION + 1}, this one reads up to {FORMAT_VERSION})" in said
    )
    assert "has fields that are ignored: also_tomorrow, tomorrow. " in said
    assert "update hf_effattn" in said


def test_a_newer_format_without_new_fields(file: Path) -> None:
    rewrite(file, **{FIELD: FORMAT_VERSION + 1})
    (said,) = said_while_loading(file)
    assert "with no unknown field" in said


def test_what_replaces_a_stored_setting_is_checked(file: Path) -> None:
    config, unused = AutoConfig.from_pretrained(file.parent, num_labels=3, foo=1, return_unused_kwargs=True)
    assert (config.num_labels, unused) == (3, {"foo": 1})
    setting, value = ("slice_length", 0) if config.model_type == "cst" else ("clusters", 0)
    with pytest.raises(ValueError, match=setting):
        AutoConfig.from_pretrained(file.parent, **{setting: value})
