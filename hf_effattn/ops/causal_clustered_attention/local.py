"""Exact attention to the nearest keys, for a CPU: parts of a softmax, merged by their log-sum-exp.

Sizes: `P` key/value heads, `g` query heads that share one, `n` queries, `m` keys.
"""

from dataclasses import dataclass

import torch

from ..bi_clustered_attention.exact_heads import FLASH, FLASH_BACKWARD

# Outputs `(P, g, n, Dv)` of a part, and the log-sum-exp of its scores, `(P, g, n, 1)`.
PartialOutput = tuple[torch.Tensor, torch.Tensor]


@dataclass
class LocalPart:
    """Scaled queries `(P, g, n, D)` over keys `(P, m, D)` and values `(P, m, Dv)`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool  # the queries are the keys' own, and see no later one; otherwise each sees all
    factor: torch.Tensor | None = None  # dropout of the weights, `(P, g, n, m)`, or None
    bias: torch.Tensor | None = None  # added to the scores, `(P, 1, 1, m)`, or None; `backward` has none

    @property
    def fused(self) -> bool:
        """Whether torch has one step for it that gives the log-sum-exp, too."""
        return self.query.device.type == "cpu" and self.factor is None and self.key.shape[2] == self.value.shape[2]

    def per_query_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(P, g, m, D)`, not copied."""
        shape = *self.query.shape[:2], -1, -1
        return self.key[:, None].expand(shape), self.value[:, None].expand(shape)

    def scores(self) -> torch.Tensor:
        """`(P, g, n, m)`."""
        scores = self.query @ self.key[:, None].transpose(2, 3)
        if self.bias is not None:
            scores += self.bias
        if not self.causal:
            return scores
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill_(later, -torch.inf)

    def attend(self) -> PartialOutput:
        """Outputs `(P, g, n, Dv)` and log-sum-exp `(P, g, n, 1)`, in memory of their own."""
        if self.fused:
            bias = {} if self.bias is None else {"attn_mask": self.bias}
            output, log_sum = FLASH(self.query, *self.per_query_head(), 0.0, self.causal, **bias, scale=1.0)
            return output, log_sum[..., None]
        scores = self.scores()
        log_sum = scores.logsumexp(dim=3, keepdim=True)
        weights = scores.softmax(dim=3)  # not from the log-sum-exp, which is too coarse where scores are large
        if self.factor is not None:
            weights *= self.factor
        return weights @ self.value[:, None], log_sum

    def backward(
        self, grad: torch.Tensor, output: torch.Tensor, log_sum: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value, for the gradient, output and log-sum-exp of the whole softmax."""
        if self.fused:
            gradients = FLASH_BACKWARD(
                grad, self.query, *self.per_query_head(), output, log_sum[..., 0], 0.0, self.causal, scale=1.0
            )
            of_key, of_value = (rows[:, 0] if rows.shape[1] == 1 else rows.sum(dim=1) for rows in gradients[1:])
            return gradients[0], of_key, of_value
        weights = self.scores().sub_(log_sum).exp_()
        grad_weights = grad @ self.value[:, None].transpose(2, 3)
        dropped = weights
        if self.factor is not None:
            grad_weights *= self.factor
            dropped = weights * self.factor
        grad_value = (dropped.transpose(2, 3) @ grad).sum(dim=1)
        grad_scores = grad_weights.sub_(torch.linalg.vecdot(grad, output)[..., None]).mul_(weights)
        grad_key = (grad_scores.transpose(2, 3) @ self.query).sum(dim=1)
        return grad_scores @ self.key[:, None], grad_key, grad_value


def merge_(whole: PartialOutput, other: PartialOutput) -> None:
    """Take another part into a softmax, in place."""
    (output, log_sum), (other_output, other_sum) = whole, other
    output.lerp_(other_output, torch.sigmoid(other_sum - log_sum))
    torch.logaddexp(log_sum, other_sum, out=log_sum)
