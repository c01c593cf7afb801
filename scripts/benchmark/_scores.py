"""How many scores causal attention over clusters computes: of keys, summaries, and centroids with distant keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

from hf_effattn.ops.causal_clustered_attention.distant_keys import DistantPart
from hf_effattn.ops.causal_clustered_attention.local import LocalPart, PartialOutput


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


def _distant(part: DistantPart) -> int:
    """Of exact keys, of the summaries and keys that each segment sees, the keys' with centroids."""
    heads, g, n, _ = part.shape
    keys, segments, topk = part.keys, part.batch.count, part.summaries.top.shape[2]
    rows = [topk + keys.G - i * keys.settings.key_clusters for i in range(segments)]
    centroids = part.previous.centroids.shape[1]
    return heads // segments * (g * n * sum(rows) + centroids * sum(part.batch.distant))


@contextmanager
def counted_scores() -> Iterator[ScoreCount]:
    """Count the scores of every forward pass of the form for a CPU."""
    count, thread = ScoreCount(), local()
    attend_locally, attend_to_distant = LocalPart.attend, DistantPart.attend

    def local_counted(part: LocalPart) -> PartialOutput:
        if not getattr(thread, "in_distant", False):  # whose parts hold summaries that a segment does not see
            count.parts.append(_local(part))
        return attend_locally(part)

    def distant_counted(part: DistantPart) -> PartialOutput:
        count.parts.append(_distant(part))
        thread.in_distant = True
        try:
            return attend_to_distant(part)
        finally:
            thread.in_distant = False

    LocalPart.attend, DistantPart.attend = local_counted, distant_counted  # type: ignore[method-assign, assignment]
    try:
        yield count
    finally:
        LocalPart.attend, DistantPart.attend = attend_locally, attend_to_distant  # type: ignore[method-assign]
