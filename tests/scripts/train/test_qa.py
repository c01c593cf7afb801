"""SQuAD's metrics by hand, windows and answers that keep to the text, and the script from the file to the answer."""

import functools
import gzip
import json
import shutil

import datasets
import evaluate
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.script_runs import whole_and_resumed
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer, ByT5Tokenizer

from hf_effattn import from_pretrained, training
from hf_effattn.data import qa_features
from hf_effattn.training.models import END_OF_TEXT
from hf_effattn.training.run import METRICS as METRICS_FOLDER
from scripts.train import qa as run_qa

METRICS = {"squad": {}, "squad_v2": {"no_answer_probability": 0.0}}
SMALL = {
    "bert": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,max_position_embeddings=32",
    "cst": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,slice_length=4,max_position_embeddings=32",
    "clusterformer": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,clusters=2,max_position_embeddings=32",
    "distilbert": "dim=16,n_layers=1,n_heads=2,hidden_dim=16,max_position_embeddings=32",
    "roberta": "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,type_vocab_size=1",
    "gpt2": "n_embd=16,n_layer=1,n_head=2,n_positions=32",
}
METHOD = ["--method", "bi-clustered clusters=2 topk=2 key_clusters=4 min_length=0"]
PLACES = ["Łódź", "the sea", "Rome", "a hill"]


def score(name, answer, *wanted, **more):
    """What the metric says about one question."""
    prediction = {"id": "1", "prediction_text": answer} | METRICS[name]
    reference = {"id": "1", "answers": {"text": list(wanted), "answer_start": [0] * len(wanted)}}
    return training.load_metric(name).compute(predictions=[prediction], references=[reference], **more)


@pytest.mark.parametrize(
    ("answer", "wanted", "exact", "f1"),
    [
        ("Denver Broncos", ["Denver Broncos"], 100, 100),
        ("the Denver  Broncos!", ["Denver Broncos"], 100, 100),
        ("An apple", ["the apple"], 100, 100),
        ("another", ["other"], 0, 0),  # "an" inside of a word is no article
        ("U.S.", ["us"], 100, 100),
        ("Łódź", ["ŁÓDŹ"], 100, 100),
        ("ten years", ["ten", "ten long years"], 0, 80),  # 2 * (1 * 2/3) / (1 + 2/3)
        ("go go go", ["go now"], 0, 40),  # one common word of three and two
        ("Rome", ["Paris"], 0, 0),
        ("", ["Paris"], 0, 0),
    ],
)
@pytest.mark.parametrize("name", METRICS)
def test_one_answer_by_hand(name, answer, wanted, exact, f1):
    result = score(name, answer, *wanted)
    assert result["exact_match" if name == "squad" else "exact"] == exact
    assert result["f1"] == pytest.approx(f1)


def test_answers_without_a_word():
    """Nothing is common to two answers of articles alone, in v1.1; in v2 they are as good as no answer."""
    assert score("squad", "the", "a") == {"exact_match": 100, "f1": 0}
    assert score("squad_v2", "the", "a")["f1"] == 100
    assert score("squad_v2", "", "a", "hill")["f1"] == 0


def test_mean_over_questions_in_any_order():
    answers = {"text": ["hill"], "answer_start": [0]}
    scores = training.load_metric("squad").compute(
        predictions=[{"id": "2", "prediction_text": "sea"}, {"id": "1", "prediction_text": "a hill"}],
        references=[{"id": name, "answers": answers} for name in "12"],
    )
    assert scores == {"exact_match": 50, "f1": 50}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_refuse_other_questions(name):
    prediction = {"id": "1", "prediction_text": ""} | METRICS[name]
    reference = {"id": "2", "answers": {"text": ["x"], "answer_start": [0]}}
    with pytest.raises(ValueError, match="differ in 2 ids"):
        training.load_metric(name).compute(predictions=[prediction], references=[reference])


def test_v1_refuses_questions_without_an_answer():
    with pytest.raises(ValueError, match="a question has no answer"):
        score("squad", "x")


V2 = [  # prediction, probability of no answer, wanted
    ("hill", 0.1, ["hill"]),
    ("the sea", 0.2, ["deep sea"]),
    ("x", 0.3, []),
    ("in Rome", 0.4, ["Rome"]),
    ("y", 0.9, []),
]


def test_v2_by_hand():
    """Five questions; what is above 0.35 is refused, right or wrong."""
    predictions = [
        {"id": str(number), "prediction_text": text, "no_answer_probability": chance}
        for number, (text, chance, _) in enumerate(V2)
    ]
    references = [
        {"id": str(number), "answers": {"text": wanted, "answer_start": [0] * len(wanted)}}
        for number, (_, _, wanted) in enumerate(V2)
    ]
    metric = training.load_metric("squad_v2")
    scores = metric.compute(predictions=predictions, references=references, no_answer_threshold=0.35)
    expected = {
        **{"exact": 40, "f1": 100 * (1 + 2 / 3 + 1) / 5, "total": 5},
        **{"HasAns_exact": 100 / 3, "HasAns_f1": 100 * (1 + 2 / 3) / 3, "HasAns_total": 3},
        **{"NoAns_exact": 50, "NoAns_f1": 50, "NoAns_total": 2},
        # To refuse all scores 2. Up to 0.1, exact is 3 and never more; F1 gains 2/3 at 0.2.
        **{"best_exact": 60, "best_exact_thresh": 0.1, "best_f1": 100 * (2 + 5 / 3) / 5, "best_f1_thresh": 0.2},
    }
    assert list(scores) == list(expected)
    assert scores == pytest.approx(expected)
    assert metric.compute(predictions=predictions, references=references)["NoAns_exact"] == 0


def test_v2_best_threshold_takes_equal_probabilities_together():
    """The right answer cannot be given without the wrong one beside it, which ruins the gain."""
    answers = [{"text": ["hill"], "answer_start": [0]}, {"text": [], "answer_start": []}]
    scores = training.load_metric("squad_v2").compute(
        predictions=[{"id": name, "prediction_text": "hill", "no_answer_probability": 0.5} for name in "12"],
        references=[{"id": name, "answers": answer} for name, answer in zip("12", answers, strict=True)],
    )
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (50, 0.0)
    assert (scores["HasAns_total"], scores["NoAns_total"]) == (1, 1)


def test_metrics_load_by_their_path_alone(tmp_path, monkeypatch):
    """As a copy of the folder elsewhere: nothing beside them is needed."""
    monkeypatch.chdir(tmp_path)
    for name in METRICS:
        shutil.copytree(METRICS_FOLDER / name, tmp_path / name)
        assert evaluate.load(str(tmp_path / name / f"{name}.py")).info.features is not None


def question_rows(repeats=1):
    """Questions about the place of things, in texts of several lengths; a fifth of them has no answer in v2."""
    rows = []
    for number in range(20 * repeats):
        place, length = PLACES[number % 4], number % 5 * 3
        text = " ".join([f"It is «{number}»."] * length + [f"The cat is in {place} 😀 now."] + ["So be it…"] * length)
        answers = {"text": [place], "answer_start": [text.index(place)]}
        rows.append({"id": f"q{number}", "question": " Where is the cat?", "context": text, "answers": answers})
    return rows


def in_squad_form(rows):
    """Rows as SQuAD's JSON has them, two texts an article."""
    paragraphs = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": row["id"],
                    "question": row["question"],
                    "answers": [
                        {"text": text, "answer_start": start}
                        for text, start in zip(*[row["answers"][name] for name in qa_features.ANSWERS], strict=True)
                    ],
                }
            ],
        }
        for row in rows
    ]
    articles = [{"title": "Cat", "paragraphs": paragraphs[start : start + 2]} for start in range(0, len(rows), 2)]
    return json.dumps({"version": "1.1", "data": articles}, indent=1)


def small_tokenizer(texts=None):
    """A byte-level BPE, made of the questions and texts."""
    texts = texts or [row["context"] + row["question"] for row in question_rows()]
    return training.train_tokenizer(texts, 330, pairs=True)


@pytest.fixture(params=["from scratch", "wordpiece"])
def tokenizer(request):
    if request.param == "from scratch":
        return small_tokenizer()
    return AutoTokenizer.from_pretrained(request.getfixturevalue("real_model_folder"))


def windows_of(rows, tokenizer, **lengths):
    """Questions as a data set, and their windows."""
    questions = datasets.Dataset.from_list(rows, qa_features.COLUMNS)
    to_windows = functools.partial(qa_features.make_windows, tokenizer=tokenizer, **lengths)
    columns = questions.column_names
    return questions, questions.map(to_windows, batched=True, batch_size=7, with_indices=True, remove_columns=columns)


def test_windows_of_long_texts(tokenizer):
    """Windows leave no gap; the tokens of an answer cover it, none too many; each answer lies in some window."""
    rows = question_rows()
    questions, windows = windows_of(rows, tokenizer, max_length=32, stride=12)
    assert len(windows) > 2 * len(rows)
    answered, reached = set(), [0] * len(rows)
    for window in windows:
        row, first, last = (window[name] for name in ("row", "start_positions", "end_positions"))
        starts, ends, text = window["token_starts"], window["token_ends"], rows[row]["context"]
        assert len(window["input_ids"]) <= 32
        assert not text[reached[row] : starts[0]].strip()
        reached[row] = ends[-1]
        if first == window["null_position"]:
            assert first == last == 0
            continue
        first, last = first - window["text_start"], last - window["text_start"]
        start = questions[row]["answers"]["answer_start"][0]
        end = start + len(questions[row]["answers"]["text"][0])
        assert starts[first] <= start < ends[first]
        assert starts[last] < end <= ends[last]
        answered.add(row)
    assert answered == set(range(len(rows)))
    assert reached == [len(row["context"]) for row in rows]


PIECES = ["Łódź", "cat", "😀", "e\u0301", "…", "ﬁ", "don't", "10,000", "漢字", "  ", "\n"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(PIECES), min_size=4), st.integers(0, 3), st.integers(1, 2))
def test_windows_of_any_text(pieces, before, length):
    """A stretch of whole pieces as the answer, in texts of odd characters."""
    text = " ".join(pieces)
    start = len(" ".join([*pieces[:before], ""]))
    answer = " ".join(pieces[before : before + length])
    if not answer.strip():
        return
    answers = {"text": [answer], "answer_start": [start]}
    row = {"id": "1", "question": "Where?", "context": text, "answers": answers}
    tokenizer = small_tokenizer(["Łódź cat don't"])
    _, windows = windows_of([row], tokenizer, max_length=64, stride=40)
    with_answer = [window for window in windows if window["start_positions"] != window["null_position"]]
    assert with_answer, "an answer of no more tokens than the stride lies in some window"
    for window in with_answer:
        first, last = (window[name] - window["text_start"] for name in ("start_positions", "end_positions"))
        assert text[window["token_starts"][first] : window["token_ends"][last]].strip() == answer.strip()


def test_questions_without_an_answer_point_at_cls(tokenizer):
    row = question_rows()[0] | {"answers": {"text": [], "answer_start": []}}
    _, windows = windows_of([row], tokenizer, max_length=64, stride=8)
    assert [windows[0][name] for name in ("start_positions", "end_positions", "null_position")] == [0, 0, 0]


def test_an_answer_that_ends_with_a_dropped_character(real_model_folder):
    """BERT's tokenizer drops accents, and its tokens end before a combining one that ends the text."""
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    answers = {"text": ["cafe\u0301"], "answer_start": [10]}
    row = {"id": "1", "question": "Where?", "context": "It is the cafe\u0301", "answers": answers}
    _, windows = windows_of([row], tokenizer, max_length=32, stride=4)
    assert windows[0]["start_positions"] == windows[0]["end_positions"] == 7


def test_long_questions_and_slow_tokenizers():
    with pytest.raises(ValueError, match=r"a question of \d+ tokens leaves \d+ of max_length=24 for the text"):
        windows_of(question_rows(), small_tokenizer(), max_length=24, stride=20)
    with pytest.raises(ValueError, match="ByT5Tokenizer does not know: use a fast tokenizer"):
        qa_features.count_from_left(ByT5Tokenizer(extra_ids=0))


def test_a_tokenizer_without_padding_gets_it_on_the_right():
    tokenizer = small_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = None, "left"
    qa_features.count_from_left(tokenizer)
    assert (tokenizer.pad_token, tokenizer.padding_side) == (END_OF_TEXT, "right")


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 80), st.integers(0, 1000))
def test_best_spans_are_those_of_trying_all(tokens, longest, count, seed):
    start, end = np.random.default_rng(seed).normal(size=(2, tokens))
    spans = [(first, last) for first in range(tokens) for last in range(first, min(first + longest, tokens))]
    spans.sort(key=lambda span: -(start[span[0]] + end[span[1]]))
    assert set(qa_features.best_spans(start, end, count, longest)) == set(spans[:count]) or count > len(spans)
    assert set(qa_features.best_spans(start, end, tokens * longest, longest)) == set(spans)


def two_windows():
    """A text whose second window begins with the last two words of the first, as `make_windows` writes it."""
    text = "one two three four five"
    words = [(0, 3), (4, 7), (8, 13), (14, 18), (19, 23)]
    questions = datasets.Dataset.from_list([{"id": "q", "context": text}])
    rows = [
        {
            "row": 0,
            "null_position": 0,
            "text_start": 2,
            "token_starts": [start for start, _ in shown],
            "token_ends": [end for _, end in shown],
        }
        for shown in (words[:4], words[2:])
    ]
    return questions, datasets.Dataset.from_list(rows)


def test_the_best_answer_over_windows():
    """A place that both windows show counts once, with its better score; the question and padding never answer."""
    questions, windows = two_windows()
    # Mark, question, words of the text, padding: high logits where no answer may be.
    start = np.array([[0, 9, 1, 0, 2, 0], [3, 9, 5, 0, 0, 9]], dtype=np.float32)
    end = np.array([[1, 9, 0, 0, 2, 1], [3, 9, 4, 1, 0, 9]], dtype=np.float32)
    (answers,) = qa_features.find_answers(questions, windows, start, end, 3, 2, with_null=True).values()
    # The empty answer comes from the first window: the second is surer that the answer lies elsewhere.
    assert [answer["text"] for answer in answers] == ["three", "three four", "two three", ""]
    assert [answer["answer_start"] for answer in answers] == [8, 8, 4, -1]
    scores = [answer["start_logit"] + answer["end_logit"] for answer in answers]
    assert scores == [9, 6, 2, 1]
    assert [answer["probability"] for answer in answers] == pytest.approx(np.exp(scores) / np.exp(scores).sum())


@pytest.fixture
def files(tmp_path):
    """A SQuAD file, gzip, and one of JSON lines with every fifth question unanswered."""
    rows = question_rows()
    with gzip.open(tmp_path / "train.json.gz", "wt", encoding="utf-8") as file:
        file.write(in_squad_form(rows))
    rows = [
        row | ({} if number % 5 else {"answers": {"text": [], "answer_start": []}}) for number, row in enumerate(rows)
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "v2.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"v1": str(tmp_path / "train.json.gz"), "v2": str(tmp_path / "v2.jsonl")}


def test_files_of_both_forms(files):
    nested = run_qa.load_questions(run_qa.DataArguments(train_files=[files["v1"]]))["train"]
    assert nested.to_list() == [{name: row[name] for name in nested.column_names} for row in question_rows()]
    arguments = run_qa.DataArguments(train_files=[files["v1"]], validation_files=[files["v2"]])
    with pytest.raises(ValueError, match="pass --version_2_with_negative"):
        run_qa.load_questions(arguments)
    arguments.version_2_with_negative = True
    arguments.max_train_samples, arguments.max_eval_samples = 5, 50
    data = run_qa.load_questions(arguments)
    assert (len(data["train"]), len(data["validation"])) == (5, 20)
    assert data["validation"]["answers"][:].count({"text": [], "answer_start": []}) == 4
    with pytest.raises(ValueError, match="no questions: name a data set"):
        run_qa.load_questions(run_qa.DataArguments())
    both = run_qa.DataArguments(dataset_name="some/name", validation_files=[files["v2"]])
    with pytest.raises(ValueError, match="--dataset_name and --validation_files name data in more than one way"):
        run_qa.load_questions(both)


def test_rows_with_blank_lines_and_rare_line_ends(tmp_path):
    """A character at which Python ends lines, though not JSON lines, and answers as SQuAD writes them."""
    row = {"id": 1, "question": "q", "context": "a\u2028b", "answers": [{"text": "b", "answer_start": 2}]}
    (tmp_path / "one.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    (question,) = qa_features.read_questions(str(tmp_path / "one.jsonl"))
    assert question == row | {"id": "1", "answers": {"text": ["b"], "answer_start": [2]}}


def command(files, kind, folder, *more, version="v1"):
    """A run of a small model on few questions, in windows of 32 tokens."""
    return [
        *("--train_files", files["v1"], "--validation_files", files[version], "--output_dir", str(folder)),
        *("--model_type", kind, "--config_overrides", SMALL[kind], "--vocab_size", "330"),
        *("--max_length", "32", "--doc_stride", "8", "--use_cpu", "--report_to", "none", "--do_train", "--do_eval"),
        *("--learning_rate", "1e-2", "--per_device_train_batch_size", "8", *more),
    ]


@pytest.mark.slow
def test_run_qa_learns_resumes_and_keeps_its_answers(files, tmp_path):
    """A run that is stopped and resumed ends as one that was not; its answers score what it says."""
    common = ["--max_steps", "60", "--save_steps", "40", "--n_best_size", "3", *METHOD]
    # The last --output_dir counts.
    whole, resumed = whole_and_resumed(run_qa.main, command(files, "bert", tmp_path, *common), tmp_path, step=40)
    assert whole["eval_f1"] > 60
    same = ("eval_loss", "eval_f1", "eval_exact_match")
    assert [resumed[name] for name in same] == pytest.approx([whole[name] for name in same], abs=1e-6)
    kept = {
        name: json.loads((tmp_path / "whole" / f"{name}.json").read_text("utf-8"))
        for name in ("eval_predictions", "eval_nbest_predictions", "all_results")
    }
    rows = question_rows()
    scores = training.load_metric("squad").compute(
        predictions=[{"id": name, "prediction_text": text} for name, text in kept["eval_predictions"].items()],
        references=[{"id": row["id"], "answers": row["answers"]} for row in rows],
    )
    assert scores["f1"] == kept["all_results"]["eval_f1"] == whole["eval_f1"]
    for row in rows:
        answers = kept["eval_nbest_predictions"][row["id"]]
        assert answers[0]["text"] == kept["eval_predictions"][row["id"]]
        assert all(row["context"].startswith(answer["text"], answer["answer_start"]) for answer in answers)
        assert len(answers) == 3
    model = from_pretrained(AutoModelForQuestionAnswering, tmp_path / "whole")
    assert model.config._attn_implementation == "bi-clustered"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind != "bert"])
def test_run_qa_refuses_questions(kind, files, tmp_path, monkeypatch):
    """From scratch, with SQuAD v2's metric: refused by the threshold; token types go to the models that know them."""
    model_class = type(AutoModelForQuestionAnswering.from_config(AutoConfig.for_model(kind)))
    given_names, forward = set(), model_class.forward

    @functools.wraps(forward)
    def watched(self, *args, **kwargs):
        given_names.update(kwargs)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(model_class, "forward", watched)
    more = ["--version_2_with_negative", "--null_score_diff_threshold", "1.5", "--pad_to_max_length"]
    metrics = run_qa.main(command(files, kind, tmp_path, *more, "--max_steps", "20", version="v2"))
    assert ("token_type_ids" in given_names) == (kind in ("cst", "clusterformer"))
    assert "attention_mask" in given_names
    assert (metrics["eval_HasAns_total"], metrics["eval_NoAns_total"]) == (16, 4)
    assert metrics["eval_best_f1"] >= metrics["eval_f1"]
    kept = {
        name: json.loads((tmp_path / f"eval_{name}.json").read_text("utf-8"))
        for name in ("predictions", "nbest_predictions", "null_odds")
    }
    for name, text in kept["predictions"].items():
        assert (not text) == (kept["null_odds"][name] > 1.5)
        assert [answer["text"] for answer in kept["nbest_predictions"][name]].count("") == 1
    by_file = training.load_metric("squad_v2").compute(
        predictions=[
            {"id": name, "prediction_text": text, "no_answer_probability": 0.0}
            for name, text in kept["predictions"].items()
        ],
        references=[{"id": row["id"], "answers": row["answers"]} for row in qa_features.read_questions(files["v2"])],
    )
    scores = [name for name in by_file if not name.startswith("best_")]
    assert [metrics[f"eval_{name}"] for name in scores] == [by_file[name] for name in scores]
    assert AutoModelForQuestionAnswering.from_pretrained(tmp_path).config.model_type == kind


def test_windows_that_are_trained_by_length_are_answered_in_order(files, tmp_path):
    by_length = ["--train_sampling_strategy", "group_by_length", "--max_steps", "20"]
    trained = run_qa.main(command(files, "bert", tmp_path / "trained", *by_length))
    evaluated = run_qa.main(
        [
            *("--validation_files", files["v1"], "--model_name_or_path", str(tmp_path / "trained"), "--do_eval"),
            *("--max_length", "32", "--doc_stride", "8", "--use_cpu", "--report_to", "none"),
            *("--output_dir", str(tmp_path / "evaluated")),
        ]
    )
    answers = [
        json.loads((tmp_path / name / "eval_predictions.json").read_text("utf-8")) for name in ("trained", "evaluated")
    ]
    assert answers[0] == answers[1]
    assert trained["eval_f1"] == evaluated["eval_f1"]
