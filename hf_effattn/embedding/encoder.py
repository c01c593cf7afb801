"""A model that turns token sequences into vectors: batches of bounded numbers of tokens, chunks put together again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..measuring.errors import run_model
from ..patching.model_types.stacks import longest_input, usual_length
from .plan import fitting_runs
from .pooling import Pooling

Sequences = Sequence[Sequence[int]]  # the chunks of a document, or all of it as one


@dataclass
class Encoder:
    """A model with its tokenizer and pooling.

    Args:
        model (`PreTrainedModel`): without its head, in eval mode; patched or not.
        tokenizer (`PreTrainedTokenizerBase`): pads.
        pooling (`Pooling`): makes a vector of a sequence's last hidden states.
        normalize (`bool`): whether the vectors of documents get length 1.
        batch_tokens (`int`): the most tokens in a batch, padding included; a longer sequence runs alone.
    """

    model: PreTrainedModel
    tokenizer: Any
    pooling: Pooling
    normalize: bool = True
    batch_tokens: int = 16_384

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id is None:  # it is masked, so any token will do
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.unk_token

    def encode(self, documents: Sequence[Sequences]) -> np.ndarray:
        """Vectors of documents.

        Args:
            documents (`Sequence[Sequence[Sequence[int]]]`): token ids of the sequences of each document. The vector of
                several is their mean, weighted by the tokens in each.

        Returns:
            `np.ndarray`: `(documents, d)` in float32.
        """
        flat = [sequence for sequences in documents for sequence in sequences]
        parts = [
            self._run(flat[start:end]) for start, end in fitting_runs([len(ids) for ids in flat], self.batch_tokens)
        ]
        vectors = torch.cat(parts)
        starts = np.cumsum([0, *(len(sequences) for sequences in documents)])
        document_vectors = []
        for start, sequences in zip(starts, documents, strict=False):
            mine = vectors[start : start + len(sequences)]
            if len(sequences) > 1:
                weights = torch.tensor([float(len(ids)) for ids in sequences], dtype=torch.float64)
                mine = ((weights / weights.sum()) @ mine)[None]
            document_vectors.append(mine)
        whole = torch.cat(document_vectors)
        kept = slice(self.pooling.truncate_dim)
        if not self.pooling.normalize:
            whole = whole[:, kept]
        if self.normalize:
            whole = torch.nn.functional.normalize(whole, dim=-1)
        return whole[:, kept].float().numpy()  # as `encode` has it: a part of the vector whose length is 1

    @torch.no_grad()
    def _run(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Pooled vectors `(B, d)` in float64."""
        side = self.tokenizer.padding_side
        rows = [torch.tensor(sequence) for sequence in sequences]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id, padding_side=side)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
        inputs = {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}
        hidden = run_model(self.model, inputs).hidden
        if hidden is None:
            raise ValueError(f"{type(self.model).__name__} returns no last hidden state: name a text encoder")
        return self.pooling(hidden, inputs["attention_mask"].bool()).double().cpu()


def longest_sequence(model: PreTrainedModel, tokenizer: Any) -> int | None:
    """The tokens that a model takes, special ones included: its learned positions, else what its config or tokenizer
    name; None where neither knows a limit."""
    learned = longest_input(model)
    if learned is not None:
        return learned
    # A tokenizer without a limit says a number beyond any text.
    named = [length for length in (usual_length(model.config), tokenizer.model_max_length) if length]
    shortest = min(named, default=None)
    return None if shortest is None or shortest > 2**31 else int(shortest)
