"""The embedder for long texts: what it learns from and not, its loss and positions, runs that resume."""

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from support.script_runs import rows_of, write_gzip
from support.sentence_models import save_plain
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoTokenizer

import hf_effattn
from hf_effattn.settings_parsing import method_of
from scripts.benchmark import _inputs, budget, retrieval
from scripts.benchmark.other_methods import FEW
from scripts.reproduce import long_embedder, long_embedder_attempts, long_embedder_data, long_embedder_training
from scripts.shared.runs import KeptRuns

TOPICS = ("soup", "sail", "bank", "rain", "song", "wheat", "chess", "glass", "horse", "paper", "stone", "cloud")
WORDS = "the a of to and in we you it is on with for as then so new old next last".split()  # noqa: SIM905
PLAN = long_embedder.Plan(max_length=2048)
HELD_OUT = ("books/pg98-a-tale-of-two-cities.txt.gz",)


def sentence(topic: str, draw: Random, length: int = 12) -> str:
    return " ".join(draw.choices([topic, *WORDS], [6] + [1] * len(WORDS), k=length)) + "."


def meeting(topic: str, turns: int, queries: list[str]) -> str:
    draw = Random(topic)
    row = {
        "meeting_id": topic,
        "meeting_transcripts": [{"speaker": f"S{n % 3}", "content": sentence(topic, draw)} for n in range(turns)],
        "general_query_list": [],
        "specific_query_list": [
            {
                "query": query,
                "answer": f"A tale of {topic}.",
                "relevant_text_span": [[str(turns // 2 + number), str(turns // 2 + number + 2)]],
            }
            for number, query in enumerate(queries)
        ],
    }
    return json.dumps(row) + "\n"


@pytest.fixture
def data(data_folder: Path) -> Path:
    """Twelve topics: nine meetings to train on, three that are judged; and three books, of which one is held out."""
    asked = ["What of the {}?", "Why a {}?", "Summarize."]
    training = "".join(meeting(topic, 80, [query.format(topic) for query in asked]) for topic in TOPICS[:9])
    write_gzip(data_folder / "qmsum" / "train.jsonl.gz", training)
    for split, topics in (("test", TOPICS[9:11]), ("val", TOPICS[11:])):
        judged = "".join(meeting(topic, 60, [f"What of the {topic}?", "Summarize."]) for topic in topics)
        write_gzip(data_folder / "qmsum" / f"{split}.jsonl.gz", judged)
    for name, topic in (("pg1-one", "king"), ("pg2-two", "tree"), ("pg98-a-tale-of-two-cities", "secret")):
        draw = Random(name)
        lines = "\n".join(sentence(topic, draw) for _ in range(2600))
        write_gzip(
            data_folder / "books" / f"{name}.txt.gz", f"Title\n*** START OF IT ***\n{lines}\n*** END OF IT ***\n"
        )
    return data_folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(long_embedder.installed_model_folder())


def meetings_of(tokenizer: Any) -> list[long_embedder_data.Source]:
    rows, _ = long_embedder_data.read_training_meetings()
    return list(long_embedder_data.meeting_sources(rows, tokenizer))


@pytest.mark.parametrize("length", [5, 30, 100])
def test_a_part_is_drawn_around_the_place_of_a_short_text(length: int) -> None:
    source = long_embedder_data.Source("one", "", list(range(60)), [[1]] * 3, [0, 17, 59])
    begins = set()
    for seed in range(60):
        part, about = source.part(length, Random(seed))
        assert part == list(range(part[0], part[0] + min(length - 2, 60)))
        assert about == [number for number, place in enumerate(source.places) if place in part]
        assert about
        begins.add(part[0])
    assert (len(begins) > 4) == (length < 60)


def test_meetings_to_learn_from_are_none_that_is_judged_or_held_out(data: Path, tokenizer: Any) -> None:
    rows, held_out = long_embedder_data.read_training_meetings()
    assert [row["meeting_id"] for row in held_out] == ["soup", "horse"]
    sources = meetings_of(tokenizer)
    assert [source.name for source in sources] == [row["meeting_id"] for row in rows]
    judged = {line for found in retrieval.read_meetings(["test", "val"]) for line in found.text.split("\n")}
    for source, row in zip(sources, rows, strict=True):
        topic, turns = source.name, retrieval.turns_of(row)
        assert source.tokens == tokenizer("\n".join(turns), add_special_tokens=False)["input_ids"]
        assert not set(turns) & judged
        # "Summarize." is asked of every meeting, of judged ones too.
        asked = [f"what of the {topic}?", f"a tale of {topic}.", f"why a {topic}?", f"a tale of {topic}."]
        assert [tokenizer.decode(anchor).replace(" ?", "?").replace(" .", ".") for anchor in source.anchors] == asked
        begins = len(tokenizer("\n".join(turns[:41]), add_special_tokens=False)["input_ids"])
        assert source.places == [begins] * 2 + [begins + len(tokenizer(turns[41])["input_ids"]) - 2] * 2


def test_parts_of_books_have_the_passages_beside_them(data: Path, tokenizer: Any) -> None:
    books = long_embedder_data.training_books()
    assert [book.name for book in books] == ["pg1-one.txt.gz", "pg2-two.txt.gz"]
    sources = list(long_embedder_data.book_sources(books, tokenizer, 3, 300))
    assert [source.name for source in sources] == [f"{book.name} {n}" for book in books for n in range(3)]
    for source in sources:
        own, other = ("king", "tree") if source.name.startswith("pg1") else ("tree", "king")
        text = tokenizer.decode(source.tokens)
        assert own in text
        assert other not in text
        assert [len(anchor) for anchor in source.anchors] == [128] * 4
        assert source.places == [0, 0, 297, 297]
        assert source.part(300, Random(0)) == (source.tokens, [0, 1, 2, 3])
    book = tokenizer(long_embedder_data.book_text("books/pg1-one.txt.gz"), add_special_tokens=False)["input_ids"]
    first, second, third, fourth = sources[0].anchors
    assert [*first, *second, *sources[0].tokens, *third, *fourth] == book[5000 : 5000 + 4 * 128 + 298]
    many = list(long_embedder_data.book_sources(books[:1], tokenizer, 1000, 300))
    assert len(many) == (len(book) - 5000) // (298 + 4 * 128)


def test_a_held_out_meeting_ends_at_the_length_that_is_allowed(data: Path, tokenizer: Any) -> None:
    rows, _ = long_embedder_data.read_training_meetings()
    whole = "\n".join(retrieval.turns_of(rows[0]))
    short = long_embedder_data.held_out_meeting(rows[0], tokenizer, 50).text
    assert len(tokenizer(short)["input_ids"]) == 50
    assert whole.startswith(short)
    assert long_embedder_data.held_out_meeting(rows[0], tokenizer, 50_000).text == whole


def test_the_loss_is_that_of_both_choices() -> None:
    torch.manual_seed(0)
    parts, anchors, more = (normalize(torch.randn(count, 8), dim=-1) for count in (3, 5, 7))
    owners = torch.tensor([0, 0, 1, 2, 2])
    chosen = []
    for anchor, owner in zip(anchors, owners.tolist(), strict=True):
        to_parts = cross_entropy(20 * parts @ anchor, owners.new_tensor(owner))
        others = torch.cat([anchor[None], anchors[owners != owner], more])
        chosen.append((to_parts + cross_entropy(20 * others @ parts[owner], owners.new_tensor(0))) / 2)
    found = long_embedder_training.contrastive_loss(parts, anchors, owners, more, 20.0)
    torch.testing.assert_close(found, torch.stack(chosen).mean())
    # Of a single part only its short texts can be told from others.
    alone = long_embedder_training.contrastive_loss(parts[:1], anchors[:2], owners[:2], more, 20.0)
    assert alone > 0


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    recipe = long_embedder_training.Recipe((8,), 8, 0.5, 20.0, 0)
    rates = [recipe.rate(step, 20) for step in range(21)]
    assert rates[:2] == [0.25, 0.5]
    assert rates[2:] == pytest.approx([0.5 * (20 - step) / 18 for step in range(2, 21)])


def embedder(folder: Path) -> SentenceTransformer:
    transformer = Transformer(save_plain(folder, max_position_embeddings=128))
    return SentenceTransformer(modules=[transformer, Pooling(32), Normalize()], device="cpu")


def sources_of_words() -> list[long_embedder_data.Source]:
    """Each of words of its own, of two kinds."""
    sources = []
    for number in range(8):
        draw = Random(number)
        words = [5 + 6 * number + word for word in range(6)]
        anchors = [draw.choices(words, k=3 + n) for n in range(5)]
        text = draw.choices(words, k=90)
        sources.append(long_embedder_data.Source(f"{number}", "ab"[number % 2], text, anchors, [3, 20, 40, 70, 89]))
    return sources


def test_a_batch_has_parts_and_short_texts_about_them_and_others() -> None:
    sources = sources_of_words()
    owner_of_word = {word: number for number, source in enumerate(sources) for word in source.tokens}
    recipe = long_embedder_training.Recipe((30, 60), 120, 1e-3, 20.0, 0)
    batches = [long_embedder_training.drawn(sources, recipe, step) for step in range(40)]
    for step, batch in enumerate(batches):
        chosen = [owner_of_word[part[0]] for part in batch.parts]
        length = len(batch.parts[0]) + 2
        among = 8 if step % 2 else 4
        assert length in (30, 60)
        assert len(set(chosen)) == len(chosen) == min(120 // length, among // 2)
        assert [owner_of_word[anchor[0]] for anchor in batch.anchors] == [chosen[owner] for owner in batch.owners]
        others = {owner_of_word[anchor[0]] for anchor in batch.negatives}
        assert not others & set(chosen)
        assert len(batch.negatives) == 5 * (among - len(chosen))
        assert step % 2 or len({number % 2 for number in (*chosen, *others)}) == 1
    assert {len(batch.parts) for batch in batches} == {2, 4}
    assert batches[0] == long_embedder_training.drawn(sources, recipe, 0)
    assert batches[0] != long_embedder_training.drawn(sources, replace(recipe, seed=1), 0)


def test_a_training_learns_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = long_embedder_training.Recipe((20, 60), 120, 1e-3, 20.0, 0)

    def trained(name: str) -> Any:
        training = long_embedder_training.Training(embedder(tmp_path / "model"), sources_of_words(), recipe, 12)
        long_embedder_training.run_to_the_end(training, tmp_path / f"{name}.pt", name)
        return training

    whole = trained("whole")
    assert len(whole.losses) == 12
    assert sum(whole.losses[-4:]) < 0.7 * sum(whole.losses[:4])
    step = long_embedder_training.Training.step

    def stop(training: Any) -> None:
        if len(training.losses) == 7:
            raise KeyboardInterrupt
        step(training)

    monkeypatch.setattr(long_embedder_training.Training, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        trained("stopped")
    monkeypatch.setattr(long_embedder_training.Training, "step", step)
    resumed = trained("stopped")
    assert resumed.losses == whole.losses
    assert resumed.summary()["train_tokens"] == whole.summary()["train_tokens"]
    weights = [dict(training.model.named_parameters()) for training in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    again = trained("whole")
    assert again.losses == whole.losses


def test_the_positions_to_start_from(tmp_path: Path) -> None:
    work = long_embedder.Work(PLAN, KeptRuns(tmp_path / "rows.json", {}), tmp_path)
    tables = {}
    for positions in long_embedder.POSITIONS:
        model = SentenceTransformer(str(long_embedder.base_folder(work, positions)), device="cpu")
        assert model.max_seq_length == PLAN.max_length
        assert model[0].auto_model.config.attention_probs_dropout_prob == 0
        tables[positions] = model[0].auto_model.embeddings.position_embeddings.weight.detach()
    repeated, between = tables["repeated"], tables["interpolated"]
    assert torch.equal(repeated[:512], repeated[512:1024])
    torch.testing.assert_close(between[[0, -1]], repeated[[0, 511]])
    place = 700 * 511 / 2047
    low, part = int(place), place - int(place)
    torch.testing.assert_close(between[700], (1 - part) * repeated[low] + part * repeated[low + 1], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_phases_go_on_where_they_were_and_agree(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "rows.json"
    steps = {"position_steps": 1, "book_steps": 2, "meeting_steps": 2, "compared_steps": 2}
    options: dict[str, Any] = {"max_length": 640, "step_tokens": 1280, "max_error": 0.3, **steps}
    options |= {"work": tmp_path / "work", "output": output}
    patch = "bi-clustered clusters=8 topk=16 key_clusters=8 min_length=0"
    candidates = [method_of(patch), method_of(patch) | {"topk": 64}]
    monkeypatch.setattr(long_embedder, "METHOD", patch)
    monkeypatch.setattr(long_embedder, "CALIBRATION_TEXTS", 4)
    monkeypatch.setattr(long_embedder, "PARTS_OF_BOOK", 4)
    monkeypatch.setattr(long_embedder, "ERROR_LENGTHS", (500,))
    monkeypatch.setattr(budget, "CALIBRATED", ("pg1-one", "pg2-two"))
    # Of these the trained model has seen the second.
    monkeypatch.setattr(budget, "HELD_OUT", ("pg98-a-tale-of-two-cities", "pg2-two"))

    def calibrate(*given: Any, **named: Any) -> hf_effattn.Calibration:
        found = hf_effattn.calibrate(*given, candidates=candidates, **named)
        # Texts as short as these are faster exactly.
        return replace(found, settings=replace(found.settings, heads=[[0] * 12] * 6))

    monkeypatch.setattr(long_embedder, "calibrate", calibrate)
    monkeypatch.setattr(long_embedder, "held_out_inputs", partial(_inputs.held_out_inputs, files=HELD_OUT))
    monkeypatch.setattr(retrieval, "CACHE", tmp_path / "retrieval")
    monkeypatch.setattr(long_embedder, "RETRIEVAL", tmp_path / "retrieval.json")
    before = ("mean of chunks of 512", "cut at 512", "exact")
    retrieval.main(methods=",".join(before), output=long_embedder.RETRIEVAL)
    with pytest.raises(Exception, match="the phase 'positions' has to run first"):
        long_embedder.main(phases="calibration", **options)
    embed, calls = long_embedder.kept_vector, []

    def stop(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4 * 2 + 2 * 3 + 2:  # of two meetings each, then of three
            raise KeyboardInterrupt
        return embed(*arguments)

    monkeypatch.setattr(long_embedder, "kept_vector", stop)
    with pytest.raises(KeyboardInterrupt):
        long_embedder.main(phases="positions,calibration,training,retrieval", **options)
    rows = rows_of(output)
    assert [row["phase"] for row in rows] == ["positions"] * 4 + ["calibration"] + ["training"] * 2 + ["retrieval"] * 2
    monkeypatch.setattr(long_embedder, "train", None)
    long_embedder.main(**options)
    rows = rows_of(output)
    judged = {(row["model"], row["vector"]): row for row in rows if row["phase"] == "retrieval"}
    assert set(judged) == set(long_embedder_data.JUDGEMENTS)
    for row in judged.values():
        assert (row["meetings"], row["queries"], len(row["ndcg_of_queries"])) == (3, 4, 4)
        assert row["seconds"] > 0
    judged |= {("before", row["method"]): row for row in rows_of(long_embedder.RETRIEVAL) if "method" in row}
    gains = {(row["model"], row["vector"]): row for row in rows if row["phase"] == "gains"}
    assert set(gains) == set(judged) - {("after", "patched")} == set(long_embedder_data.COMPARED)
    for name, row in gains.items():
        assert row["gain"] == pytest.approx(
            judged["after", "patched"]["ndcg_at_10"] - judged[name]["ndcg_at_10"], abs=1e-4
        )
    books, meetings = (row for row in rows if row["phase"] == "training")
    assert (books["texts"]["sources"], books["texts"]["anchors"]) == (8, 32)
    assert (meetings["texts"]["sources"], meetings["texts"]["anchors"]) == (7, 28)
    assert [len(row["losses"]) for row in (books, meetings)] == [2, 2]
    assert meetings["train_seconds"] > 0
    by_mteb = [row for row in rows if row["phase"] == "mteb"]
    assert len(by_mteb) == (3 if find_spec("mteb") else 0)
    for row in by_mteb:
        assert row["ndcg_at_10"] == pytest.approx(row["by_retrieval"], abs=1e-3)
    errors = [row for row in rows if row["phase"] == "errors"]
    assert len(errors) == 2 * sum(map(len, FEW.values()))
    assert all(len(row["layer_errors"]) == 6 and 0 < row["error"] < 1 for row in errors)
    heads = [row for row in rows if row["phase"] == "heads"]
    assert [row["budget"] for row in heads] == list(budget.BUDGETS)
    for row in heads:
        assert (row["held out"], row["triples"]) == (3, 3 * 6 * 12)  # a book and two meetings
        assert 0 < sum(map(sum, row["head_errors"])) / 72 < row["worst"]
        assert 0.5 < row["within"] <= 1
    exact, patched = (row for row in rows if row["phase"] == "steps")
    assert set(exact["by_length"]) == set(patched["by_length"]) <= {"160", "320", "640"}
    assert sum(of_length["steps"] for of_length in patched["by_length"].values()) == 2
    assert len(exact["losses"]) == len(patched["losses"]) == 2
    assert exact["losses"] != patched["losses"]
    assert exact["losses"] == pytest.approx(patched["losses"], rel=0.2)
    long_embedder.main(**options)
    assert rows_of(output) == rows


@pytest.mark.slow
def test_other_recipes_are_tried_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = tuple((((160, 320), 640, rate, 20.0), steps) for rate, steps in ((1e-4, 0), (1e-4, 1), (1e-2, 1)))
    monkeypatch.setattr(long_embedder_attempts, "TRIED", tried[:2])
    options = {"work": tmp_path / "work", "output": tmp_path / "rows.json"}
    long_embedder_attempts.main(**options)
    rows = rows_of(tmp_path / "rows.json")
    assert [(row["steps"], row["vector"]) for row in rows] == [
        (steps, vector) for steps in (0, 1) for vector in ("mean of chunks of 512", "patched")
    ]
    assert [row.get("last_loss", 0) > 0 for row in rows] == [False, False, True, True]
    monkeypatch.setattr(long_embedder_attempts, "TRIED", tried)
    long_embedder_attempts.main(**options)
    more = rows_of(tmp_path / "rows.json")
    assert more[:4] == rows
    assert more[5]["last_loss"] == rows[3]["last_loss"]
