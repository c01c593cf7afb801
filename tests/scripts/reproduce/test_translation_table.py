"""The table of translation: its rows, and that it goes on where it stopped, between runs and within one."""

import gzip
import random

import pytest
import typer
from support.script_runs import rows_of

from scripts.reproduce import translation as translation_table
from scripts.shared import data as shared_data
from scripts.train import translation as run_translation


@pytest.fixture
def small_table(tmp_path, monkeypatch):
    """Numbers to be written in another language, in the place of Multi30k; models that learn them in seconds."""
    folder = tmp_path / "data" / "multi30k"
    folder.mkdir(parents=True)
    monkeypatch.setenv(shared_data.VARIABLE, str(folder.parent))
    words = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four"}
    draw = random.Random(0)
    for split, count in (("train", 200), ("test_2016_flickr", 12)):
        sentences = [draw.choices(list(words), k=4) for _ in range(count)]
        for language, translated in (("de", sentences), ("en", [[words[word] for word in row] for row in sentences])):
            text = "".join(" ".join(row) + "\n" for row in translated)
            (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setattr(translation_table, "SIZES", translation_table.SIZES | small)
    quick = {"vocab_size": 300, "max_target_length": 8, "num_beams": 2}
    monkeypatch.setattr(translation_table, "TRAINING", translation_table.TRAINING | quick)


@pytest.mark.slow
def test_translation_table(small_table, tmp_path, monkeypatch, capsys):
    output = tmp_path / "table.json"
    arguments = {"seeds": "0,1", "epochs": 2, "dtype": "float32", "output": output}
    translation_table.main("Transformer;gated", **arguments)
    rows = rows_of(output)
    assert [row["settings"] for row in rows] == [{"assignment": "full"}, translation_table.GATED] * 2
    assert all(0 <= row["bleu"] <= 100 and row["seconds_per_epoch"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert " (2)" in printed
    assert "ClusterFormer, paper, IWSLT14" in printed
    assert "34.9" in printed
    monkeypatch.setattr(translation_table, "measure", None)
    translation_table.main("Transformer;gated", **arguments)
    assert rows_of(output) == rows
    with pytest.raises(typer.BadParameter, match="unknown rows"):
        translation_table.main("Reformer", **arguments)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(small_table, tmp_path, monkeypatch, capsys):
    arguments = {"seeds": "0", "epochs": 2, "dtype": "float32", "checkpoints": tmp_path / "checkpoints"}
    translation_table.main("neural", output=tmp_path / "whole.json", **arguments)
    assert list((tmp_path / "checkpoints").iterdir()) == []

    step = run_translation.TranslationTrainer.training_step

    def stop_at_6(self, *arguments):
        if self.state.global_step == 6:
            raise KeyboardInterrupt
        return step(self, *arguments)

    output = tmp_path / "stopped.json"
    with monkeypatch.context() as patched:
        patched.setattr(run_translation.TranslationTrainer, "training_step", stop_at_6)
        with pytest.raises(KeyboardInterrupt):
            translation_table.main("neural", output=output, **arguments)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]
    translation_table.main("neural", output=output, **arguments)
    whole, stopped = rows_of(tmp_path / "whole.json") + rows_of(output)
    assert stopped["seconds_per_epoch"] is None
    assert [stopped[name] for name in ("bleu", "test_loss")] == pytest.approx(
        [whole[name] for name in ("bleu", "test_loss")]
    )
    assert "neural" in capsys.readouterr().out
