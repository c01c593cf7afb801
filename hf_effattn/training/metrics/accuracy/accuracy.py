"""Accuracy for `evaluate.load`, computed by scikit-learn; the keys are those of the Hub's metric."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score  # type: ignore[import-untyped]


class Accuracy(evaluate.Metric):
    """Share of right predictions, or their number with `normalize=False`."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int32")
        return evaluate.MetricInfo(
            description="Share of predictions that are right.",
            citation="",
            inputs_description="predictions and references: class numbers.",
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(
        self,
        predictions: np.ndarray,
        references: np.ndarray,
        normalize: bool = True,
        sample_weight: np.ndarray | None = None,
    ) -> dict[str, float]:
        accuracy = accuracy_score(references, predictions, normalize=normalize, sample_weight=sample_weight)
        return {"accuracy": float(accuracy)}
