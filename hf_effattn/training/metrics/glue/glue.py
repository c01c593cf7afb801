"""The metrics of GLUE for `evaluate.load`, by scikit-learn and scipy; the keys are those of the Hub's metric."""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr  # type: ignore[import-untyped]
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef  # type: ignore[import-untyped]

ACCURACY = ("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli", "hans")
ACCURACY_AND_F1 = ("mrpc", "qqp")
TASKS = ("cola", "stsb", *ACCURACY_AND_F1, *ACCURACY)


class Glue(evaluate.Metric):
    """What GLUE reports of a task: `evaluate.load(path, "cola")`."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in TASKS:
            raise KeyError(f"the second argument names a task: {', '.join(TASKS)}; got {self.config_name!r}")
        value = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="Accuracy, F1, Matthews correlation, or Pearson and Spearman correlation, as the task has it.",
            citation="",
            inputs_description="predictions and references: class numbers; for stsb, scores.",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        if self.config_name == "cola":
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
        if self.config_name == "stsb":
            return {
                "pearson": float(pearsonr(predictions, references)[0]),
                "spearmanr": float(spearmanr(predictions, references)[0]),
            }
        scores = {"accuracy": float(accuracy_score(references, predictions))}
        if self.config_name in ACCURACY_AND_F1:
            scores["f1"] = float(f1_score(references, predictions))
        return scores
