"""`effattn models`: every type of the tables, once."""

import json

from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from hf_effattn.cli import app
from hf_effattn.patching.model_types.table import MODEL_TYPES, NOT_SERVED, served_rows

runner = CliRunner()


def test_every_type_is_listed_once() -> None:
    shown = [line.split() for line in runner.invoke(app, ["models"]).stdout.splitlines() if line.strip()]
    for name in MODEL_TYPES:
        assert len([words for words in shown if words[0] == name]) == 1, name
    words = {word.strip(",") for line in shown for word in line}
    assert NOT_SERVED.keys() <= words


def test_json() -> None:
    models = json.loads(runner.invoke(app, ["models", "--json"]).stdout)
    assert models["served"].keys() == MODEL_TYPES.keys()
    assert models["served"]["gte"]["positions"] == "rotary"
    assert models["served"]["xlm-roberta"]["positions"] == "learned, extendable"
    assert models["served"]["bart"]["what is patched"] == "encoder, its decoder exact"
    assert models["served"]["llama"]["what is patched"] == "decoder"
    assert models["not served"] == NOT_SERVED


def test_at_least_fifty_are_served_and_no_type_is_in_both_tables() -> None:
    assert len(MODEL_TYPES) >= 50
    assert not MODEL_TYPES.keys() & NOT_SERVED.keys()
    assert all(all(row) for row in served_rows())


def test_names_are_those_of_transformers() -> None:
    """Older versions lack some; this catches a name that none has."""
    missing = [name for name in (*MODEL_TYPES, *NOT_SERVED) if name not in CONFIG_MAPPING]
    assert len(missing) <= 15, missing
