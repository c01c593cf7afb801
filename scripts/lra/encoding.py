"""Token numbers for the Long Range Arena: a tokenizer for each task, and the batches that a model is given."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .listops import TOKENS

PAD = "<pad>"
_BYTE_TASKS = ("text", "retrieval")
_PIXEL_TASKS = ("image", "pathfinder")


def lra_tokenizer(task: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a task, which a model is saved with.

    ListOps has a number for each of 15 words; Text and Retrieval have bytes, numbered as in ByT5; Image and Pathfinder
    a pixel's brightness, written as a word. Number 0 always pads: a model that knows nothing of padding would take
    black pixels for it, so they are 1 here.
    """
    if task in _BYTE_TASKS:
        return ByT5Tokenizer(extra_ids=0)
    words = [str(brightness) for brightness in range(256)] if task in _PIXEL_TASKS else list(TOKENS)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate([PAD, *words])}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD)


class LRACollator:
    """Makes a batch of rows as `load_lra` has them; nothing is stored beside the data set.

    Args:
        task (`str`): which task.
        tokenizer (`PreTrainedTokenizerBase`): what `lra_tokenizer(task)` returns.
        max_length (`int`): tokens of an input; longer ones are cut. Of a pair: of each text.
        two_towers (`bool`): whether a model reads the texts of a pair apart, as `CSTForPairClassification` does; else
            they come as one input with `</s>` between.
    """

    def __init__(
        self,
        task: str,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        two_towers: bool = False,
    ) -> None:
        self.task, self.tokenizer, self.max_length, self.two_towers = task, tokenizer, max_length, two_towers

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` `(rows, longest)`, and `labels` `(rows,)`.

        Of a pair also `pair_input_ids` and `pair_attention_mask`, or `token_type_ids`.
        """
        if self.task == "retrieval":
            batch = self._pairs(rows)
        elif self.task == "text":
            batch = self._padded([self._bytes(row["text"]) for row in rows])
        elif self.task in _PIXEL_TASKS:
            batch = self._padded([np.asarray(row["pixels"], dtype=np.int64)[: self.max_length] + 1 for row in rows])
        else:
            numbers = self.tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"]
            batch = self._padded([np.array(tokens[: self.max_length]) for tokens in numbers])
        return batch | {"labels": torch.tensor([row["label"] for row in rows])}

    def _bytes(self, text: str) -> np.ndarray:
        # What the tokenizer does character by character; its special tokens come first.
        return np.frombuffer(text.encode()[: self.max_length], dtype=np.uint8).astype(np.int64) + self.tokenizer.offset

    def _pairs(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        first, second = ([self._bytes(row[name]) for row in rows] for name in ("text1", "text2"))
        if self.two_towers:
            pair = {f"pair_{name}": tensor for name, tensor in self._padded(second).items()}
            return self._padded(first) | pair
        between = np.array([self.tokenizer.eos_token_id])
        joined = [np.concatenate([text1, between, text2]) for text1, text2 in zip(first, second, strict=True)]
        batch = self._padded(joined)
        places = torch.arange(batch["input_ids"].shape[1])
        starts = torch.tensor([len(text) + 1 for text in first])
        batch["token_type_ids"] = (places >= starts[:, None]).long() * batch["attention_mask"]
        return batch

    def _padded(self, numbers: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        # Of an empty text one padding token counts: attention to nothing, and the mean of nothing, are no numbers.
        longest = max(1, *(len(row) for row in numbers))
        input_ids = np.full((len(numbers), longest), self.tokenizer.pad_token_id)
        mask = np.zeros_like(input_ids)
        for row, tokens in enumerate(numbers):
            input_ids[row, : len(tokens)] = tokens
            mask[row, : max(1, len(tokens))] = 1
        return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}
