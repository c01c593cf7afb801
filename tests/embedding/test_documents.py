"""Reading documents: odd rows and files are told, never a crash."""

import codecs
import json

import pytest

from hf_effattn.embedding import documents
from hf_effattn.embedding.documents import Folder, JSONLines, Skipped, UnreadableError, as_shown


def texts(source):
    return {doc.id: "".join(source.pieces(doc)) for doc in source.documents() if not isinstance(doc, Skipped)}


def test_a_line_that_is_too_long_is_skipped_and_the_next_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST_LINE_BYTES", 50)
    rows = [json.dumps({"text": "a" * size}) for size in (5, 200, 7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    source = JSONLines(tmp_path / "rows.jsonl", "text")
    assert texts(source) == {1: "a" * 5, 3: "a" * 7}
    (skipped,) = [doc for doc in source.documents() if isinstance(doc, Skipped)]
    assert (skipped.id, skipped.why) == (2, "the line has 213 bytes, at most 50 are read")


def test_characters_over_the_end_of_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 3)
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "aé€𝄞".encode() * 4)
    (tmp_path / "b.txt").write_bytes("a€€".encode()[:-1])
    source = Folder(tmp_path)
    first, second = source.documents()
    assert "".join(source.pieces(first)) == "aé€𝄞" * 4
    with pytest.raises(UnreadableError, match="unexpected end of data at byte 4"):
        list(source.pieces(second))


def test_a_digest_knows_names_and_contents(tmp_path):
    for name, content in (("a", "one"), ("b", "two")):
        (tmp_path / name).write_text(content)
    before = Folder(tmp_path).digest()
    assert Folder(tmp_path).digest() == before
    (tmp_path / "b").write_text("owt")
    changed = Folder(tmp_path).digest()
    (tmp_path / "b").write_text("two")
    (tmp_path / "b").rename(tmp_path / "c")
    assert len({before, changed, Folder(tmp_path).digest()}) == 3


def test_names_that_are_no_unicode_are_shown(tmp_path):
    assert as_shown("a\udcffb") == "a?b"
    assert as_shown(7) == "7"
