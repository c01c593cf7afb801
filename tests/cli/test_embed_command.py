"""`effattn embed`: the vectors are the model's, whatever the documents, and a stopped run ends as an unbroken one."""

import errno
import json
import random
import sys
from functools import cache

import numpy as np
import pyarrow.parquet
import pytest
import torch
from filelock import FileLock
from support.embedding_cases import POSITIONS, save_documents, save_encoder, save_pooling, text
from support.tiny_models import tiny_model
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

import hf_effattn
from hf_effattn.cli import app
from hf_effattn.embedding import kept, run
from hf_effattn.reporting.findings import Findings

runner = CliRunner()
LENGTHS = [3, 40, 12, 61, 7, 25, 1, 33]
LONG = [400, 90, 700, 64]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def documents(tmp_path):
    return save_documents(tmp_path / "documents", LENGTHS)


def embed(model, documents, output, *options):
    return runner.invoke(app, ["embed", str(model), str(documents), "--output", str(output), *map(str, options)])


def embedded(model, documents, output, *options):
    """Vectors by id, and what was said."""
    result = embed(model, documents, output, *options)
    assert result.exit_code == 0, result.output
    return vectors_by_id(output), " ".join(result.stderr.split())


def vectors_by_id(output):
    ids = [json.loads(line)["id"] for line in (output / "ids.jsonl").read_text().splitlines()]
    return dict(zip(ids, np.load(output / "vectors.npy"), strict=True))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@cache
def loaded(model):
    return AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()


def hidden_states(model, words):
    """Last hidden states of one text without padding, `(tokens, 16)`, by transformers alone."""
    tokenizer, exact = loaded(model)
    with torch.no_grad():
        return exact(**tokenizer(words, return_tensors="pt")).last_hidden_state[0]


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_vectors_are_the_means_of_the_models_hidden_states(encoder, documents, tmp_path):
    vectors, said = embedded(encoder, documents, tmp_path / "out", "--batch-tokens", "100")
    assert list(vectors) == sorted(path.relative_to(documents).as_posix() for path in documents.rglob("*.txt"))
    for name, vector in vectors.items():
        assert vector.dtype == np.float32
        assert_close(vector, hidden_states(encoder, (documents / name).read_text()).mean(dim=0))
    assert "8 documents, 198 tokens, the longest 63" in said
    assert " take about " in said
    assert "8/8 documents" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "vectors.npy", "ids.jsonl", "skipped.jsonl", "embed.json", ".lock"
    }  # fmt: skip
    manifest = json.loads((tmp_path / "out" / "embed.json").read_text())
    assert manifest["finished"]
    assert (manifest["documents"], manifest["tokens"], manifest["longest"]) == (8, 198, 63)


def test_parquet_and_json_lines_hold_the_same(encoder, documents, tmp_path):
    expected, _ = embedded(encoder, documents, tmp_path / "npy")
    rows = [{"key": n, "body": (documents / name).read_text(), "other": 1} for n, name in enumerate(expected)]
    file = tmp_path / "documents.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = ["--text-field", "body", "--id-field", "key", "--format", "parquet"]
    result = embed(encoder, file, tmp_path / "parquet", *options)
    assert result.exit_code == 0, result.output
    table = pyarrow.parquet.read_table(tmp_path / "parquet" / "vectors.parquet")
    assert table["id"].to_pylist() == [str(n) for n in range(len(LENGTHS))]
    lengths = [len(row["body"].split()) + 2 for row in rows]
    assert table["tokens"].to_pylist() == lengths
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), np.stack(list(expected.values())))


@pytest.mark.slow_except("last")
@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
def test_a_named_pooling(mode, encoder, documents, tmp_path):
    vectors, _ = embedded(encoder, documents, tmp_path / "out", "--pooling", mode, "--normalize")
    for name, vector in vectors.items():
        hidden = hidden_states(encoder, (documents / name).read_text())
        expected = {"mean": hidden.mean(dim=0), "cls": hidden[0], "last": hidden[-1]}[mode]
        assert_close(vector, torch.nn.functional.normalize(expected, dim=0))


@pytest.mark.slow_except("cls", "max")
@pytest.mark.parametrize("mode", ["cls", "last", "max"])
def test_a_stored_pooling_is_that_of_sentence_transformers(mode, documents, tmp_path):
    """Its prompt before every document too; the library loads what is not served here."""
    import sentence_transformers as library

    folder = save_encoder(tmp_path / "encoder")
    save_pooling(folder, mode=mode, prompt="ba be ")
    vectors, _ = embedded(folder, documents, tmp_path / "out", "--batch-tokens", "100", "--max-length", POSITIONS)
    texts = [(documents / name).read_text() for name in vectors]
    model = library.SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = POSITIONS
    assert_close(np.stack(list(vectors.values())), model.encode_document(texts))


def test_layers_behind_the_pooling_are_those_of_sentence_transformers(documents, tmp_path):
    """As EmbeddingGemma has them; chunks are pooled one by one."""
    import sentence_transformers as library
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(0)
    layers = [modules.Transformer(str(save_encoder(tmp_path / "encoder"))), modules.Pooling(16), modules.Dense(16, 5)]
    model = library.SentenceTransformer(modules=layers, device="cpu")
    model.save(str(tmp_path / "dense"))
    model.max_seq_length = POSITIONS
    vectors, _ = embedded(tmp_path / "dense", documents, tmp_path / "out")
    texts = [(documents / name).read_text() for name in vectors]
    assert_close(np.stack(list(vectors.values())), model.encode(texts))
    chunked, _ = embedded(tmp_path / "dense", documents, tmp_path / "chunked", "--chunk", POSITIONS)
    assert_close(np.stack(list(chunked.values())), np.stack(list(vectors.values())))


def test_pooling_that_needs_the_library_says_so(encoder, documents, tmp_path, monkeypatch):
    folder = save_encoder(tmp_path / "encoder")
    save_pooling(folder, mode="max")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    result = embed(folder, documents, tmp_path / "out")
    assert result.exit_code == 1
    assert "pip install sentence-transformers" in result.output
    assert embed(folder, documents, tmp_path / "out", "--pooling", "mean").exit_code == 0


def test_what_is_no_text_is_skipped_with_a_reason(encoder, documents, tmp_path):
    (documents / "empty.txt").touch()
    (documents / "blank.txt").write_text(" \n\t\n" * 5)
    (documents / "binary.bin").write_bytes(random.Random(0).randbytes(5000))
    (documents / "latin.txt").write_bytes("Größe ".encode("latin-1") * 3)
    (documents / "half.txt").write_bytes("ba be é".encode()[:-1])
    (documents / "huge.txt").write_text(text(1000) + (" " + text(5000, 1)) * 800)  # 12 MB
    (documents / "gone.txt").symlink_to(documents / "nothing")
    (documents / ".hidden").write_text("ba")
    expected, _ = embedded(encoder, save_documents(tmp_path / "plain", LENGTHS), tmp_path / "expected")
    vectors, said = embedded(encoder, documents, tmp_path / "out", "--max-length", POSITIONS)
    skipped = {row["id"]: f"{row['what']}: {row['why']}" for row in lines_of(tmp_path / "out" / "skipped.jsonl")}
    assert skipped == {
        "binary.bin": "skipped: " + skipped["binary.bin"].removeprefix("skipped: "),
        "blank.txt": "skipped: empty",
        "empty.txt": "skipped: empty",
        "gone.txt": "skipped: a link to nothing",
        "half.txt": "skipped: not UTF-8 text: unexpected end of data at byte 6",
        "huge.txt": "cut: only its first 64 tokens are read",
        "latin.txt": "skipped: not UTF-8 text: invalid start byte at byte 2",
    }
    assert skipped["binary.bin"].startswith("skipped: binary, or not UTF-8")
    assert "6 documents skipped: " in said
    assert "1 document cut at 64 tokens" in said
    assert vectors.keys() == expected.keys() | {"huge.txt"}
    for name, vector in expected.items():
        assert_close(vectors[name], vector)
    assert_close(vectors["huge.txt"], hidden_states(encoder, text(1000)[: 62 * 3]).mean(dim=0))


def test_rows_that_are_no_documents_are_skipped_with_a_reason(encoder, tmp_path):
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"id": "é", "text": "ba be"}).encode()
    bad = [b'{"text": 5}', b"{broken", b"[1]", b'{"other": "ba"}', b'{"text": "\\ud800"}', b"\xff", b'{"text": ""}']
    file.write_bytes(b"\n".join([good, b"", *bad, b'{"text": "bi"}']))
    vectors, said = embedded(encoder, file, tmp_path / "out")
    assert list(vectors) == ["é", 10]  # a row without an id has the number of its line
    skipped = {row["id"]: row["why"] for row in lines_of(tmp_path / "out" / "skipped.jsonl")}
    assert list(skipped) == [3, 4, 5, 6, 7, 8, 9]
    assert skipped[6] == "no text in the field 'text'; the row has 'other'"
    assert skipped[9] == "empty"
    assert "7 documents skipped: " in said


def test_documents_longer_than_the_model_need_a_choice(encoder, tmp_path):
    documents = save_documents(tmp_path / "documents", LONG)
    result = embed(encoder, documents, tmp_path / "out")
    assert result.exit_code == 1
    assert "4 of 4 documents have more than the 64 tokens that the model takes" in " ".join(result.output.split())
    assert not (tmp_path / "out" / "embed.json").exists()
    for option in ("--extend-positions", "--chunk 64", "--max-length 64"):
        assert option in " ".join(result.output.split())


def test_extended_positions_give_the_vectors_of_the_extended_model(encoder, tmp_path):
    documents = save_documents(tmp_path / "documents", LONG)
    vectors, _ = embedded(encoder, documents, tmp_path / "out", "--extend-positions", "--max-length", 500)
    model = hf_effattn.extend_positions(AutoModel.from_pretrained(encoder).eval(), 500)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    for name, vector in vectors.items():
        inputs = tokenizer((documents / name).read_text(), return_tensors="pt", truncation=True, max_length=500)
        with torch.no_grad():
            assert_close(vector, model(**inputs).last_hidden_state[0].mean(dim=0))
    assert [row["id"] for row in lines_of(tmp_path / "out" / "skipped.jsonl")] == ["early/002.txt"]


def test_the_vector_of_chunks_is_their_mean_weighted_by_tokens(encoder, tmp_path):
    documents = save_documents(tmp_path / "documents", [*LONG, 5])
    vectors, _ = embedded(encoder, documents, tmp_path / "out", "--chunk", 32, "--batch-tokens", 100)
    for name, vector in vectors.items():
        words = (documents / name).read_text().split()
        chunks = [" ".join(words[start : start + 30]) for start in range(0, len(words), 30)]
        states = [hidden_states(encoder, chunk) for chunk in chunks]
        assert_close(vector, torch.cat(states).mean(dim=0))


def test_a_method_runs_and_is_the_librarys(encoder, tmp_path):
    documents = save_documents(tmp_path / "documents", LONG)
    method = "bi-clustered clusters=6 topk=8 key_clusters=7 min_length=0"
    options = ["--extend-positions", "--batch-tokens", 64]
    vectors, said = embedded(encoder, documents, tmp_path / "out", *options, "--method", method)
    exact, _ = embedded(encoder, documents, tmp_path / "exact", *options)
    assert "Attention: bi-clustered clusters=6 topk=8 key_clusters=7." in said
    model = hf_effattn.extend_positions(AutoModel.from_pretrained(encoder).eval(), 702)
    settings = {"clusters": 6, "topk": 8, "key_clusters": 7, "min_length": 0}
    hf_effattn.patch_attention(model, "bi-clustered", **settings).save_pretrained(tmp_path / "patched")
    AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "patched")
    saved, _ = embedded(tmp_path / "patched", documents, tmp_path / "saved", "--batch-tokens", 64)
    for name, vector in vectors.items():
        np.testing.assert_array_equal(saved[name], vector)
        assert not np.allclose(vector, exact[name], atol=1e-5)


def test_windows_run_in_blocks_unless_something_else_is_asked_for(encoder, tmp_path):
    documents = save_documents(tmp_path / "documents", LONG)
    model = tmp_path / "windows"
    words = AutoTokenizer.from_pretrained(encoder)
    tiny_model("modernbert", vocab_size=len(words), max_position_embeddings=2048).save_pretrained(model)
    words.save_pretrained(model)
    vectors, said = embedded(model, documents, tmp_path / "out", "--batch-tokens", 64)
    assert "Attention: exact." in said
    assert json.loads((tmp_path / "out" / "embed.json").read_text())["chosen"] == {"method": "exact"}
    for name, vector in vectors.items():
        expected = AutoModel.from_pretrained(model).eval()
        inputs = words((documents / name).read_text(), return_tensors="pt")
        with torch.no_grad():
            assert_close(vector, expected(**inputs).last_hidden_state[0].mean(dim=0))
    hf_effattn.patch_attention(expected, "clustered", clusters=6, min_length=0).save_pretrained(tmp_path / "patched")
    words.save_pretrained(tmp_path / "patched")
    patched, said = embedded(tmp_path / "patched", documents, tmp_path / "as-patched", "--batch-tokens", 64)
    assert "exact" not in said
    for name, vector in patched.items():
        assert not np.allclose(vector, vectors[name], atol=1e-5)


@pytest.mark.slow_except("10.0-clustered")
@pytest.mark.parametrize(("budget", "best"), [(10.0, "clustered"), (1e-9, None)])
def test_a_largest_error_chooses_from_the_methods_of_report(budget, best, encoder, tmp_path, monkeypatch):
    """The speeds are given, for a machine's would make another choice each time; the errors are measured."""
    settings = {"clusters": 6, "min_length": 0}
    methods = ({"method": "clustered", **settings}, {"method": "i-clustered", "topk": 8, **settings})
    monkeypatch.setattr("hf_effattn.measuring.candidates.DEFAULT_METHODS", methods)
    speeds = {"clustered clusters=6": 3.0, "i-clustered clusters=6 topk=8": 2.0}
    monkeypatch.setattr(Findings, "speedup", lambda self, measured, part="forward": speeds.get(measured.method, 1.0))
    documents = save_documents(tmp_path / "documents", LONG)
    vectors, said = embedded(encoder, documents, tmp_path / "out", "--extend-positions", "--max-error", budget)
    assert "Measuring the methods on 1 of the longer texts, of up to 702 tokens." in said
    chosen = json.loads((tmp_path / "out" / "embed.json").read_text())["chosen"]
    assert (chosen and chosen["method"]) == best
    if best is None:
        assert "No method is faster within --max-error: exact attention." in said
        expected, _ = embedded(encoder, documents, tmp_path / "exact", "--extend-positions")
    else:
        assert 0 < chosen["hidden_error"] <= budget
        assert f"Attention: clustered clusters=6, error {chosen['hidden_error']:.3f}." in said
        method = "clustered clusters=6 min_length=0"
        expected, _ = embedded(encoder, documents, tmp_path / "named", "--extend-positions", "--method", method)
    for name, vector in expected.items():
        np.testing.assert_array_equal(vectors[name], vector)


def test_a_largest_error_of_short_documents_measures_nothing(encoder, documents, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_effattn.embedding.choice.report", None)
    _, said = embedded(encoder, documents, tmp_path / "out", "--max-error", "0.1")
    assert "exact attention" in said


class StoppedError(BaseException):
    """As a kill: nothing catches it."""


def stop_at_write(number, moment, write):
    """A stand-in for the writing of files that stops before or after the file takes its place."""
    remaining = number

    def write_or_stop(path, fill, **how):
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            if moment == "after":
                write(path, fill, **how)
            else:
                path.with_name(path.name + kept.PART).write_bytes(b"half of")
            raise StoppedError
        write(path, fill, **how)

    return write_or_stop


@pytest.mark.slow_except("npy-before")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_a_run_that_stops_at_any_write_goes_on_to_the_same_file(
    form, moment, encoder, documents, tmp_path, monkeypatch
):
    options = ["--batch-tokens", "70", "--format", form]
    assert embed(encoder, documents, tmp_path / "whole", *options).exit_code == 0
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir() if path.name != "embed.json"}
    write = kept.write_atomically
    stops = 0
    while True:
        output = tmp_path / f"stopped-{stops}"
        monkeypatch.setattr(kept, "write_atomically", stop_at_write(stops, moment, write))
        try:
            embed(encoder, documents, output, *options)
        except StoppedError:
            stops += 1
        else:
            break
        monkeypatch.setattr(kept, "write_atomically", write)
        assert embed(encoder, documents, output, *options).exit_code == 0
        assert {path.name for path in output.iterdir()} == expected.keys() | {"embed.json"}
        for name, content in expected.items():
            assert (output / name).read_bytes() == content, (stops, name)
    shards = 4
    assert stops == shards + (6 if form == "npy" else 5)  # counts, skipped, manifest; ids, vectors, manifest


def test_a_run_with_other_options_is_refused_in_words(encoder, documents, tmp_path):
    before, _ = embedded(encoder, documents, tmp_path / "out")
    result = embed(encoder, documents, tmp_path / "out", "--pooling", "cls")
    assert result.exit_code == 1
    assert "pooling: None, now cls" in " ".join(result.output.split())
    (documents / "more.txt").write_text("ba")
    result = embed(encoder, documents, tmp_path / "out")
    assert result.exit_code == 1
    assert "contents of the documents changed" in " ".join(result.output.split())
    (documents / "more.txt").unlink()
    again, said = embedded(encoder, documents, tmp_path / "out")
    assert "is finished already" in said
    assert all((again[name] == vector).all() for name, vector in before.items())
    other = save_encoder(tmp_path / "other", positions=POSITIONS * 2)
    result = embed(other, documents, tmp_path / "out")
    assert "weights changed" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{encoder}", "nothing"], "there is no folder and no file nothing"),
        (["{encoder}", "file.txt"], "neither a folder nor JSON Lines"),
        (["{encoder}", "blank"], "has no document to embed: out/skipped.jsonl says why (1 skipped)"),
        (["{encoder}", "empty"], "empty has no document to embed, nothing at all"),
        (["no-such-model", "documents"], "Error"),
        (["{encoder}", "documents", "--output", "documents/out"], "lies among the documents"),
        (["{encoder}", "documents", "--output", "file.txt"], "is a file"),
        (["{encoder}", "documents", "--output", "blank"], "holds other things (blank.txt)"),
        (["{encoder}", "documents", "--pooling", "max"], "pooling must be one of mean, cls, last"),
        (["{encoder}", "documents", "--format", "csv"], "--format must be one of npy, parquet"),
        (["{encoder}", "documents", "--dtype", "int8"], "--dtype must be one of"),
        (["{encoder}", "documents", "--device", "nowhere"], "device 'nowhere' cannot be used"),
        (["{encoder}", "documents", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["{encoder}", "documents", "--chunk", "65"], "longer than the 64 tokens"),
        (["{encoder}", "documents", "--chunk", "2"], "leave no room for text"),
        (["{encoder}", "documents", "--max-length", "65"], "add --extend-positions"),
        (["{encoder}", "documents", "--batch-tokens", "0"], "--batch-tokens must be at least 1"),
        (["{encoder}", "documents", "--max-error", "0"], "--max-error must be above 0"),
        (["{encoder}", "documents", "--max-error", "0.1", "--method", "clustered"], "give one of them"),
        (["{encoder}", "documents", "--chunk", "9", "--extend-positions"], "give one"),
        (["{encoder}", "documents", "--method", "j-clustered"], "did you mean"),
        (["{encoder}", "documents", "--text-field", "body"], "are for JSON Lines"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_mistakes_are_told_without_a_traceback(arguments, message, encoder, documents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("ba")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "blank.txt").write_text(" ")
    arguments = [part.format(encoder=encoder) for part in arguments]
    result = runner.invoke(app, ["embed", "--output", "out", *arguments])
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.glob("*/embed.json"))
    assert not (tmp_path / "out").exists() or "no document" in message


def test_two_runs_into_one_folder_are_refused(encoder, documents, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / kept.LOCK):
        result = embed(encoder, documents, tmp_path / "out")
    assert result.exit_code == 1
    assert "another run is writing to" in result.output
    assert embed(encoder, documents, tmp_path / "out").exit_code == 0


def test_a_file_system_without_locks_serves_too(encoder, documents, tmp_path, monkeypatch):
    def no_lock(lock):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", no_lock)
    embedded(encoder, documents, tmp_path / "out")


def test_documents_that_change_meanwhile_stop_the_run(encoder, documents, tmp_path, monkeypatch):
    plan = run.plan_windows

    def change(*arguments):
        (documents / "early" / "000.txt").write_text("ba " * 50)
        return plan(*arguments)

    monkeypatch.setattr(run, "plan_windows", change)
    result = embed(encoder, documents, tmp_path / "out")
    assert result.exit_code == 1
    assert "early/000.txt was changed during the run" in " ".join(result.output.split())


@pytest.mark.parametrize("terminal", [True, False])
def test_an_interruption_says_how_to_go_on(terminal, encoder, documents, tmp_path, monkeypatch):
    def stop(self, index, write):
        raise KeyboardInterrupt

    monkeypatch.setattr(kept.Shards, "add", stop)
    monkeypatch.setattr("hf_effattn.cli.embedding.lines_of_progress", lambda: None if terminal else print)
    result = embed(encoder, documents, tmp_path / "out")
    assert result.exit_code == 130
    assert "the same command goes on from here" in result.stderr
