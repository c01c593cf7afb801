"""How many scores causal attention over clusters computes: of keys, summaries, and centroids with older keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

from hf_effattn.ops.causal_clustered_attention.local import Attended, LocalPart
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
    """Of exact keys, of the summaries and keys that each segment sees, the keys' with centroids."""
    heads, g, n, _ = part.shape
    keys, segments, topk = part.keys, part.span.count, part.summaries.top.shape[2]
    rows = [topk + keys.G - i * keys.settings.key_clusters for i in range(segments)]
    centroids = part.past.centroids.shape[1]
    return heads // segments * (g * n * sum(rows) + centroids * sum(part.span.older))


@contextmanager
def counted_scores() -> Iterator[ScoreCount]:
    """Count the scores of every forward pass of the form for a CPU."""
    found, thread = ScoreCount(), local()
    attend_locally, attend_to_older = LocalPart.attend, OlderPart.attend

    def local_counted(part: LocalPart) -> Attended:
        if not getattr(thread, "in_older", False):  # whose parts hold summaries that a segment does not see
            found.parts.append(_local(part))
        return attend_locally(part)

    def older_counted(part: OlderPart) -> Attended:
        found.parts.append(_older(part))
        thread.in_older = True
        try:
            return attend_to_older(part)
        finally:
            thread.in_older = False

    LocalPart.attend, OlderPart.attend = local_counted, older_counted  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        LocalPart.attend, OlderPart.attend = attend_locally, attend_to_older  # type: ignore[method-assign]
