"""What is kept of RULER's tasks; `lm_eval` itself is not asked."""

import json
from pathlib import Path

import pytest
import typer
from support.tiny_models import tiny_model

from scripts.benchmark import ruler


def is_patched(model):
    return getattr(model.config, "effattn", None) is not None


def test_every_task_is_asked_of_both_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    model, calls = tiny_model("bert"), []

    def score(model, tokenizer, task, name, length, prompts):
        calls.append((name, length, prompts, is_patched(model)))
        return 0.5 if is_patched(model) else 0.8

    monkeypatch.setattr(ruler, "load", lambda: (model, None))
    monkeypatch.setattr(ruler, "prompts_of", lambda task, length, tokenizer: {})
    monkeypatch.setattr(ruler, "score", score)
    options = {"lengths": "4096", "methods": "bi-clustered", "tasks": "ruler_vt,ruler_fwe", "prompts": 3}
    output = tmp_path / "ruler.json"
    ruler.main(**options, output=output)
    assert calls == [(task, 4096, 3, patched) for task in ("ruler_vt", "ruler_fwe") for patched in (False, True)]
    assert not is_patched(model)
    table = ruler.retention(json.loads(output.read_text())["rows"]).set_index("name")
    assert table.loc["bi-clustered", "retention"] == pytest.approx(0.5 / 0.8)
    assert table.loc["exact", "retention"] == 1.0
    ruler.main(**options, output=output)  # nothing is asked again
    assert len(calls) == 4
    assert "retention" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="unknown tasks"):
        ruler.main(**options | {"tasks": "ruler_qa"}, output=output)
