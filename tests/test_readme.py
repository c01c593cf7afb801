"""The README says what the kept results say, and its code runs."""

import re
from pathlib import Path

import pytest
import torch
import update_readme

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.parametrize("path", update_readme.TABLES, ids=lambda path: path.parent.name)
def test_tables_are_those_of_the_results(path):
    assert update_readme.updated(path) == path.read_text(encoding="utf-8"), "run: python scripts/update_readme.py"


def test_pictures_and_commands_exist():
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (README.parent / target).is_file(), target
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|\n)make (\w+)", text):
        assert f"\n{target}:" in makefile, target


def test_the_ten_lines_run(real_model_folder, tmp_path, monkeypatch):
    """As printed, with the local model's folder in place of its name on the Hub and less text."""
    code = re.search(r"## Ten lines\n\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    code = code.replace('"sentence-transformers/all-MiniLM-L6-v2"', repr(str(real_model_folder)))
    code = code.replace("8192", "640").replace('patch_attention(model, "i-clustered",', "\\g<0> min_length=0,")
    code = code.replace("\\g<0> min_length=0,", 'patch_attention(model, "i-clustered", min_length=0,')
    (tmp_path / "long.txt").write_text("It was the best of times, it was the worst of times. " * 80, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    assert names["embedding"].shape == (1, 384)
    assert torch.isfinite(names["embedding"]).all()
