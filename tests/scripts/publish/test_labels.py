"""Every label of settings in the committed JSON and texts is a method that the command line reads."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_effattn.cli.arguments import method_of
from hf_effattn.measuring.candidates import make_candidates

ROOT = Path(__file__).resolve().parents[3]
JSON = sorted([*(ROOT / "scripts" / "results").rglob("*.json"), *(ROOT / "model_cards").rglob("report.json")])
TEXTS = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "node_modules"} & set(path.parts))
LABEL = re.compile(r"""(?<![\w-])(?:(?:i-|bi-)?clustered|cst)(?: \w+=(?:\[[^\]]*\]|[^\s|`",:;)]+))+""")
BOTH = False, True  # encoders, decoders
IN_LETTERS = re.compile(r"clustered (?:\(\w+=|[CkG]=)")


def strings(value: Any) -> Iterator[str]:
    """All keys and strings in a JSON value; a method and the settings beside it as one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)
    elif isinstance(value, dict):
        if isinstance(value.get("method"), str) and isinstance(value.get("name"), str):
            yield f"{value['method']} {value['name']}"
        for key, entry in value.items():
            yield key
            yield from strings(entry)


def measured(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The labels that stand beside their settings, in reports and in results of `bench`."""
    if isinstance(value, dict):
        methods = value.get("methods")
        if isinstance(methods, dict):
            yield from ((label, settings) for label, settings in methods.items() if LABEL.fullmatch(label))
        for entry in value.values():
            yield from measured(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from measured(entry)


def settings_of(method: Any) -> dict[str, Any]:
    """Of whichever kind of model has them."""
    return make_candidates(method, kinds=BOTH)[0].to_dict() | {"min_length": 0}


@pytest.mark.parametrize("path", [*JSON, *TEXTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_label_is_read_back(path):
    text = path.read_text(encoding="utf-8")
    assert not IN_LETTERS.search(text)
    for label in set(LABEL.findall("\n".join(strings(json.loads(text))) if path.suffix == ".json" else text)):
        settings = settings_of(method_of(label))
        assert settings_of(method_of(make_candidates(settings, kinds=BOTH)[0].label)) == settings


def test_labels_beside_their_settings_say_them():
    pairs = [pair for path in JSON for pair in measured(json.loads(path.read_text(encoding="utf-8")))]
    assert len(pairs) > 10
    for label, settings in pairs:  # of kernels they are those of the day, defaults included
        assert method_of(label).items() <= settings.items()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "bi-clustered", "max_predicted_error": None, "layers": (-1, 0)},
        {
            "method": "bi-clustered",
            "max_predicted_error": 0.06342583512604237,
            "clustering": "lsh",
            "fit_queries": 100,
        },
        {"method": "cst", "slice_length": 4, "composition": "local-global", "extension_ratio": 2.5},
        {"method": "i-clustered", "tolerance": 0.1, "on_excess": "warn", "check_finite": True},
        {
            "method": "bi-clustered",
            "causal": True,
            "exact_keys": 96,
            "max_predicted_error": None,
            "segment_length": 512,
        },
        {"method": "exact"},
    ],
    ids=lambda settings: settings["method"],
)
def test_any_settings_are_typed_as_they_are_printed(settings):
    kinds = [settings.get("causal", False)]
    (candidate,) = make_candidates([settings], kinds=kinds)
    assert make_candidates(method_of(candidate.label), kinds=kinds) == [candidate]
