"""SQuAD v2's exact match and F1 for `evaluate.load`, where some questions have no answer; the Hub's keys."""

import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any

import datasets
import evaluate
import numpy as np

MARKS = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


# As in squad.py, which says why it stands in both.
def words(text: str) -> list[str]:
    """The words that count: in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(MARKS)).split()


def overlap(predicted: list[str], wanted: list[str]) -> float:
    """F1 of the words, each as often as it stands there; unlike in v1.1, no words at all are equal to no words."""
    if not predicted or not wanted:
        return float(predicted == wanted)
    return 2 * (Counter(predicted) & Counter(wanted)).total() / (len(predicted) + len(wanted))


def best_threshold(scores: np.ndarray, gains: np.ndarray, probability: np.ndarray) -> tuple[float, float]:
    """The highest sum of scores that a threshold can reach, and the lowest such threshold.

    Args:
        scores (`np.ndarray`): what each question scores where it is refused.
        gains (`np.ndarray`): what it scores more where it is answered, which may be less than nothing.
        probability (`np.ndarray`): that it has no answer; it is answered up to the threshold.

    Returns: `(sum, threshold)`; the threshold is 0 where it is best to refuse all.
    """
    thresholds, place = np.unique(probability, return_inverse=True)
    sums = scores.sum() + np.cumsum(np.bincount(place, weights=gains))
    best = int(np.argmax(sums))
    return (float(sums[best]), float(thresholds[best])) if sums[best] > scores.sum() else (float(scores.sum()), 0.0)


class SquadV2(evaluate.Metric):
    """Exact match and F1 in percent, where to refuse a question is right if it has no answer.

    `exact` and `f1` refuse the questions whose `no_answer_probability` is above `no_answer_threshold`; `best_*` are
    those of the best threshold. Questions of equal probability are refused together, so that every best score can be
    reached; SQuAD's own program may end between two of them.

    Source: Rajpurkar et al. 2018 and the evaluation that was published with it.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        # Written out, as lists in a `dict`, this is one type in every version of datasets.
        answers = {"text": datasets.Sequence(text), "answer_start": datasets.Sequence(datasets.Value("int32"))}
        prediction = {"id": text, "prediction_text": text, "no_answer_probability": datasets.Value("float64")}
        return evaluate.MetricInfo(
            description="Exact match and F1 of SQuAD v2.",
            citation="",
            inputs_description="predictions: id, prediction_text, no_answer_probability; references: id and answers.",
            features=datasets.Features({"predictions": prediction, "references": {"id": text, "answers": answers}}),
        )

    def _compute(
        self,
        predictions: Iterable[dict[str, Any]],
        references: Iterable[dict[str, Any]],
        no_answer_threshold: float = 1.0,
    ) -> dict[str, float]:
        predicted = {row["id"]: row for row in predictions}
        wanted = {row["id"]: row["answers"]["text"] for row in references}
        if wanted.keys() != predicted.keys():
            raise ValueError(f"predictions and references differ in {len(wanted.keys() ^ predicted.keys())} ids")
        exact, f1 = np.zeros(len(wanted)), np.zeros(len(wanted))
        for place, (name, answers) in enumerate(wanted.items()):
            answer = words(predicted[name]["prediction_text"])
            # An answer without a word that counts is as good as none.
            wanted_words = [counted for counted in map(words, answers) if counted] or [[]]
            exact[place] = answer in wanted_words
            f1[place] = max(overlap(answer, other) for other in wanted_words)
        has_answer = np.array([bool(answers) for answers in wanted.values()])
        answered = np.array([bool(predicted[name]["prediction_text"]) for name in wanted])
        probability = np.array([predicted[name]["no_answer_probability"] for name in wanted])
        refused = probability > no_answer_threshold
        scores = {"exact": np.where(refused, ~has_answer, exact), "f1": np.where(refused, ~has_answer, f1)}
        results: dict[str, float] = {}
        for prefix, chosen in (("", np.ones_like(has_answer)), ("HasAns_", has_answer), ("NoAns_", ~has_answer)):
            if chosen.any():
                results |= {prefix + name: 100 * float(values[chosen].mean()) for name, values in scores.items()}
                results[prefix + "total"] = int(chosen.sum())
        for name, raw in (("exact", exact), ("f1", f1)):
            gains = np.where(has_answer, raw, -answered.astype(float))
            best, threshold = best_threshold((~has_answer).astype(float), gains, probability)
            results |= {f"best_{name}": 100 * best / len(wanted), f"best_{name}_thresh": threshold}
        return results
