"""How well a classifier of pairs ranks the answers to a question: mean average precision, mean reciprocal rank."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BATCH = 64


def ranking(questions: Iterable[list[tuple[float, bool]]]) -> dict[str, float]:
    """`map` and `mrr` in percent.

    Args:
        questions: for each question its candidates, a score and whether it is an answer. Questions without an answer
            are left out, as is usual for WikiQA; of equal scores the answer counts as the last.
    Returns: `dict` of the two.
    Raises: `ValueError` if no question has an answer.
    """
    precisions, reciprocals = [], []
    for candidates in questions:
        ordered = sorted(candidates, key=lambda pair: (-pair[0], pair[1]))
        places = [place for place, (_, is_answer) in enumerate(ordered, start=1) if is_answer]
        if places:
            precisions.append(sum(rank / place for rank, place in enumerate(places, start=1)) / len(places))
            reciprocals.append(1 / places[0])
    if not precisions:
        raise ValueError("no question has an answer")
    return {name: 100 * sum(part) / len(part) for name, part in (("map", precisions), ("mrr", reciprocals))}


@torch.no_grad()
def rank_answers(folder: str, examples: Iterable[dict[str, str]], max_length: int) -> dict[str, float]:
    """`ranking` by the model that a training script left in a folder.

    Args:
        folder (`str`): of the model and its tokenizer.
        examples: pairs `text` and `second_text` with the label "1" or "0", those of a question one after the other.
        max_length (`int`): tokens of a pair.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForSequenceClassification.from_pretrained(Path(folder)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(Path(folder))
    examples = list(examples)
    scores: list[float] = []
    for start in range(0, len(examples), BATCH):
        pairs = [(example["text"], example["second_text"]) for example in examples[start : start + BATCH]]
        inputs = tokenizer(
            *map(list, zip(*pairs, strict=True)),
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )
        logits = model(**inputs.to(device)).logits
        scores += (logits[:, model.config.label2id["1"]] - logits[:, model.config.label2id["0"]]).tolist()
    scored = zip(examples, scores, strict=True)
    grouped = groupby(scored, key=lambda pair: pair[0]["text"])
    return ranking([(score, example["label"] == "1") for example, score in group] for _, group in grouped)
