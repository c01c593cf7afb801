"""SQuAD v1.1's exact match and F1 for `evaluate.load`; the keys are those of the Hub's metric."""

import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any

import datasets
import evaluate

MARKS = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


# As in squad_v2.py, because `evaluate` loads a copy of a metric's file: it takes a module along from the same folder
# only, and one beside the scripts would be missing wherever the metric is loaded by its path alone.
def words(text: str) -> list[str]:
    """The words that count: in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(MARKS)).split()


def overlap(predicted: list[str], wanted: list[str]) -> float:
    """F1 of the words, each as often as it stands there; 0 where none is common to both."""
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


class Squad(evaluate.Metric):
    """Share of answers that are one of the reference's, and mean F1 with the nearest of them, both in percent.

    Source: Rajpurkar et al. 2016, section 6.1.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        # Written out, as lists in a `dict`, this is one type in every version of datasets.
        answers = {"text": datasets.Sequence(text), "answer_start": datasets.Sequence(datasets.Value("int32"))}
        return evaluate.MetricInfo(
            description="Exact match and F1 of SQuAD v1.1.",
            citation="",
            inputs_description="predictions: id and prediction_text; references: id and answers, as SQuAD has them.",
            features=datasets.Features(
                {"predictions": {"id": text, "prediction_text": text}, "references": {"id": text, "answers": answers}}
            ),
        )

    def _compute(
        self, predictions: Iterable[dict[str, str]], references: Iterable[dict[str, Any]]
    ) -> dict[str, float]:
        wanted = {row["id"]: [words(text) for text in row["answers"]["text"]] for row in references}
        predicted = {row["id"]: words(row["prediction_text"]) for row in predictions}
        if wanted.keys() != predicted.keys():
            raise ValueError(f"predictions and references differ in {len(wanted.keys() ^ predicted.keys())} ids")
        if [] in wanted.values():
            raise ValueError("a question has no answer: SQuAD v1.1 has no such question, squad_v2 counts them")
        exact = [predicted[name] in answers for name, answers in wanted.items()]
        f1 = [max(overlap(predicted[name], answer) for answer in answers) for name, answers in wanted.items()]
        return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1) / len(f1)}
