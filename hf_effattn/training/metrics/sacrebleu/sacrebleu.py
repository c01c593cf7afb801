"""BLEU for `evaluate.load`, by sacrebleu; the keys are those of the Hub's metric."""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from sacrebleu.metrics.bleu import BLEU


class Sacrebleu(evaluate.Metric):
    """BLEU of all translations together, of text that is not tokenized (Source: Post 2018)."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="BLEU of a corpus, in percent.",
            citation="",
            inputs_description="predictions: texts; references: a text to each, or as many texts to each of them.",
            features=[
                datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
                datasets.Features({"predictions": text, "references": text}),
            ],
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[str] | Sequence[Sequence[str]],
        smooth_method: str = "exp",
        smooth_value: float | None = None,
        force: bool = False,
        lowercase: bool = False,
        tokenize: str | None = None,
        use_effective_order: bool = False,
    ) -> dict[str, Any]:
        several = [[texts] if isinstance(texts, str) else list(texts) for texts in references]
        counts = {len(texts) for texts in several}
        if len(counts) != 1:
            raise ValueError(f"every prediction needs the same number of references, got {sorted(counts)}")
        bleu = BLEU(
            lowercase=lowercase,
            force=force,
            tokenize=tokenize,
            smooth_method=smooth_method,
            smooth_value=smooth_value,
            effective_order=use_effective_order,
        )
        # sacrebleu goes by the references: the first of every text, the second of every text, ...
        score = bleu.corpus_score(list(predictions), [list(texts) for texts in zip(*several, strict=True)])
        names = ("score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len")
        return {name: getattr(score, name) for name in names}
