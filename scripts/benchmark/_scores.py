"""How many scores causal attention over clusters computes: of keys, summaries, and centroids with older keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_effattn.ops.causal_clustered_attention.local import LocalPart
from hf_effattn.ops.causal_clustered_attention.older import OlderPart


class ScoreCount:
    """What was computed so far, and the share of it in exact causal attention."""

    def __init__(self) -> None:
        self.parts: list[int] = []  # appended to by several threads

    def share(self, heads: int, length: int) -> float:
        """Of exact attention's scores of so many query heads, all layers and texts together."""
        return sum(self.parts) / (heads * length * (length + 1) / 2)


def _local(part: LocalPart) -> int:
    heads, g, n, _ = part.query.shape
    return heads * g * (n * (n + 1) // 2 if part.causal else n * part.key.shape[1])


def _older(part: OlderPart) -> int:
    """Of the summaries and keys that each segment sees, the keys' with centroids; exact keys count as a local part."""
    heads, g, n, _ = part.shape
    keys, segments = part.keys, part.span.count
    summaries = [keys.G - i * keys.settings.key_clusters for i in range(segments)]
    centroids = part.past.centroids.shape[1]
    return heads // segments * (g * n * sum(summaries) + centroids * sum(part.span.older))


@contextmanager
def counted_scores() -> Iterator[ScoreCount]:
    """Count the scores of every forward pass of the form for a CPU."""
    found = ScoreCount()

    def counting(attend: Callable[[Any], Any], count: Callable[[Any], int]) -> Callable[[Any], Any]:
        def attend_counted(part: Any) -> Any:
            found.parts.append(count(part))
            return attend(part)

        return attend_counted

    kept = LocalPart.attend, OlderPart.attend
    LocalPart.attend = counting(kept[0], _local)  # type: ignore[method-assign, assignment]
    OlderPart.attend = counting(kept[1], _older)  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        LocalPart.attend, OlderPart.attend = kept  # type: ignore[method-assign]
