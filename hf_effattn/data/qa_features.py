"""Questions from files, cut into windows of tokens, and the answers that a model's logits on these windows stand for.

A text longer than the model reads is cut into windows that overlap; a window without the answer points at its first
special token, and so does a question that has none.
"""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedTokenizerBase

TEXT = Value("string")
ANSWERS = {"text": Sequence(TEXT), "answer_start": Sequence(Value("int32"))}
COLUMNS = Features({"id": TEXT, "question": TEXT, "context": TEXT, "answers": ANSWERS})


def read_questions(path: str) -> Iterator[dict[str, Any]]:
    """The questions of a file (gzip too), a row each: of SQuAD's JSON, which nests them, or of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        content = file.read()
    try:
        entries = json.loads(content)["data"]
    except (json.JSONDecodeError, KeyError):  # more than one JSON value, or one row
        entries = [json.loads(line) for line in content.split("\n") if line.strip()]
    for entry in entries:
        for paragraph in entry.get("paragraphs", [entry]):
            for row in paragraph.get("qas", [paragraph]):
                answers = row.get("answers") or []
                if isinstance(answers, list):
                    answers = {name: [answer[name] for answer in answers] for name in ANSWERS}
                texts = {"context": paragraph["context"], "question": row["question"]}
                yield {"id": str(row["id"]), "answers": {name: answers[name] for name in ANSWERS}, **texts}


def count_from_left(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have padding on the right, since the places of answers are counted from the left, whatever pads; in place.

    Raises:
        ValueError: a tokenizer that does not know where in the text its tokens lie.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"answers are found by the tokens' places in the text, which {type(tokenizer).__name__} does not know:"
            " use a fast tokenizer"
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def null_position(input_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The place that means "no answer here": the classification token, else the first token."""
    return input_ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in input_ids else 0


def make_windows(
    rows: dict[str, list[Any]],
    numbers: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
    token_types: bool = True,
) -> dict[str, list[Any]]:
    """Question and text as tokens, in as many windows as the text needs; for `Dataset.map` with indices.

    Args:
        rows (`dict`): `question`, `context`, and `answers` with `text` and `answer_start`; the first is learnt.
        numbers (`list[int]`): which rows of the data set these are.
        tokenizer (`PreTrainedTokenizerBase`): a fast one.
        max_length (`int`): tokens of a window.
        stride (`int`): tokens of the text that two neighbouring windows have in common.
        token_types (`bool`): keep the tokenizer's `token_type_ids`.

    Returns: for each window the tokenizer's inputs, `start_positions` and `end_positions` (tokens, the last included),
        `row` (number of the question), `null_position`, `text_start` (the first token of the text), and where each
        token of the text lies: `token_starts`, `token_ends` (characters, the end excluded).

    Raises:
        ValueError: a question leaves no more than `stride` tokens for the text.
    """
    # Byte-level tokenizers make tokens of the blanks that some questions begin with.
    questions = [question.strip() for question in rows["question"]]
    longest = max(map(len, tokenizer(questions, add_special_tokens=False)["input_ids"]))
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True) - longest
    if room <= stride:
        raise ValueError(
            f"a question of {longest} tokens leaves {max(room, 0)} of max_length={max_length} for the text, which must"
            f" be more than the stride of {stride}"
        )
    encoded = tokenizer(
        questions,
        rows["context"],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=token_types and "token_type_ids" in tokenizer.model_input_names,
    )
    owners = encoded.pop("overflow_to_sample_mapping")
    offsets = encoded.pop("offset_mapping")
    windows: dict[str, list[Any]] = dict(encoded)
    added: list[dict[str, Any]] = []
    for window, owner in enumerate(owners):
        text_tokens = np.array([kind == 1 for kind in encoded.sequence_ids(window)])
        starts, ends = np.array(offsets[window], dtype=np.int32)[text_tokens].T
        null = null_position(encoded["input_ids"][window], tokenizer)
        text_start = int(text_tokens.argmax())
        # What the tokenizer drops, such as blanks, belongs to a window at either end of the text all the same.
        is_first = window == 0 or owners[window - 1] != owner
        is_last = window + 1 == len(owners) or owners[window + 1] != owner
        reach = (0 if is_first else starts[0], len(rows["context"][owner]) if is_last else ends[-1])
        first, last = answer_tokens(rows["answers"][owner], starts, ends, reach)
        has_answer = first <= last
        added.append(
            {
                "row": numbers[owner],
                "null_position": null,
                "text_start": text_start,
                "token_starts": starts,
                "token_ends": ends,
                "start_positions": text_start + first if has_answer else null,
                "end_positions": text_start + last if has_answer else null,
            }
        )
    return windows | {name: [row[name] for row in added] for name in added[0]}


def answer_tokens(
    answers: dict[str, list[Any]], starts: np.ndarray, ends: np.ndarray, reach: tuple[int, int]
) -> tuple[int, int]:
    """First and last of a window's tokens that cover the first answer; (0, -1) where it does not lie in the window."""
    if not answers["text"]:
        return 0, -1
    text = answers["text"][0]
    start = answers["answer_start"][0] + len(text) - len(text.lstrip())
    end = start + len(text.strip())
    if start < reach[0] or end > reach[1]:
        return 0, -1
    return int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(starts, end, side="left")) - 1


def best_spans(start: np.ndarray, end: np.ndarray, count: int, max_length: int) -> list[tuple[int, int]]:
    """First and last token of the `count` spans with the highest sum of logits, among those of up to `max_length`."""
    if not start.size:
        return []
    padded = np.pad(end, (0, max_length - 1), constant_values=-np.inf)
    scores = start[:, None] + np.lib.stride_tricks.sliding_window_view(padded, max_length)
    count = min(count, scores.size)
    chosen = np.argpartition(scores, scores.size - count, axis=None)[-count:]
    first, more = np.unravel_index(chosen[np.isfinite(scores.ravel()[chosen])], scores.shape)
    return list(zip(first.tolist(), (first + more).tolist(), strict=True))


def find_answers(
    questions: Dataset,
    windows: Dataset,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best_size: int,
    max_answer_length: int,
    with_null: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """The best answers to each question, over all of its windows; a place that two windows show counts once.

    Args:
        questions (`Dataset`): `id` and `context` of each.
        windows (`Dataset`): of `make_windows`, in the order of the logits.
        start_logits, end_logits (`np.ndarray`): `(windows, N)`, where `N` is the length of the longest window.
        n_best_size (`int`): answers to a question.
        max_answer_length (`int`): tokens of an answer.
        with_null (`bool`): one more answer, the empty one. Its score is its lowest of all windows, since a window that
            does not hold the answer says so too.

    Returns: for each question's id its answers, the best first: `text`, `answer_start`, `start_logit`, `end_logit`
        and `probability`, the softmax of the sums of logits over these answers.
    """
    spans: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in range(len(questions))]
    nulls: list[tuple[float, float]] = [(np.inf, np.inf)] * len(questions)
    columns = ["row", "null_position", "text_start", "token_starts", "token_ends"]
    placed = windows.select_columns(columns).with_format("numpy")
    for window, start, end in zip(placed, start_logits, end_logits, strict=True):
        row, first_token = int(window["row"]), int(window["text_start"])
        empty = int(window["null_position"])
        nulls[row] = min(nulls[row], (float(start[empty]), float(end[empty])), key=sum)
        of_text = slice(first_token, first_token + len(window["token_starts"]))
        start, end = start[of_text], end[of_text]
        for first, last in best_spans(start, end, n_best_size, max_answer_length):
            place = int(window["token_starts"][first]), int(window["token_ends"][last])
            logits = float(start[first]), float(end[last])
            spans[row][place] = max(logits, spans[row].get(place, logits), key=sum)
    best_answers = {}
    for question, places, null in zip(questions.select_columns(["id", "context"]), spans, nulls, strict=True):
        answers = []
        for (begin, end), logits in sorted(places.items(), key=lambda item: -sum(item[1])):
            text = question["context"][begin:end]
            blanks = len(text) - len(text.lstrip())  # byte-level tokens have them in front
            if text.strip():
                answers.append({"text": text.strip(), "answer_start": begin + blanks, "logits": logits})
        answers = answers[:n_best_size]
        if with_null:
            answers.append({"text": "", "answer_start": -1, "logits": null})
        best_answers[question["id"]] = rank(answers)
    return best_answers


def rank(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers by the sum of their logits, the highest first, with the softmax of these sums as probability."""
    answers = sorted(answers, key=lambda answer: -sum(answer["logits"]))
    scores = np.array([sum(answer["logits"]) for answer in answers])
    weights = np.exp(scores - scores.max(initial=-np.inf))
    return [
        {
            "text": answer["text"],
            "answer_start": answer["answer_start"],
            "start_logit": answer["logits"][0],
            "end_logit": answer["logits"][1],
            "probability": float(weight / weights.sum()),
        }
        for answer, weight in zip(answers, weights, strict=True)
    ]
