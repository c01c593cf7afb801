"""Running text for language models: from the Hub or from files, cut into examples of one length."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from .checks import check_one_source
from .gutenberg import GUTENBERG
from .hub_data import load_from_hub

# Characters that become tokens at a time, of which each takes about 200 bytes meanwhile.
PORTION = 2**20
GIVEN_BY = {
    "train": "--train_files or a --dataset_name that has them",
    "validation": "--validation_files or a --dataset_name that has them",
}


@dataclass
class DataArguments:
    """Which text, and how it is cut."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, with a column `text`."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_files: list[str] = field(default_factory=list, metadata={"help": "Text files, one document each."})
    validation_files: list[str] = field(default_factory=list, metadata={"help": "Held-out text files."})
    block_length: int = field(default=1024, metadata={"help": "Tokens of an example."})
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on so many examples of that length, drawn by lot."}
    )
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many, drawn by lot."})

    @property
    def most(self) -> dict[str, int | None]:
        """How many examples of each split are taken."""
        return {"train": self.max_train_samples, "validation": self.max_eval_samples}


def load_texts(arguments: DataArguments) -> DatasetDict:
    """The splits `train` and `validation` with a column `text`, a document or a line a row.

    Raises:
        ValueError: no text is named, or both a data set of the Hub and files.
    """
    check_one_source(arguments, ("dataset_name", "dataset_config_name"), ("train_files", "validation_files"))
    if arguments.dataset_name is not None:
        return load_from_hub(arguments.dataset_name, arguments.dataset_config_name, instead="--train_files")
    files = {"train": arguments.train_files, "validation": arguments.validation_files}
    files = {split: paths for split, paths in files.items() if paths}
    if not files:
        raise ValueError("no text: name a data set with --dataset_name, or files with --train_files")
    texts = load_dataset("text", data_files=files, sample_by="document")
    return texts.map(
        lambda row: (
            {"text": GUTENBERG.search(row["text"] + "*** END OF")[1].strip()}  # type: ignore[index]
            if "*** START OF" in row["text"] or "***START OF" in row["text"]
            else row
        )
    )


def portions(texts: Dataset, characters: int = PORTION) -> Iterator[list[str]]:
    """The texts one after the other, some at a time: as few as have so many characters together."""
    portion: list[str] = []
    size = 0
    for rows in texts.select_columns("text").iter(batch_size=16):
        for text in rows["text"]:
            portion.append(text)
            size += len(text) + 1  # so that empty lines count too
            if size >= characters:
                yield portion
                portion, size = [], 0
    if portion:
        yield portion


def blocks(
    texts: DatasetDict, tokenizer: PreTrainedTokenizerBase, length: int, characters: int = PORTION
) -> DatasetDict:
    """All tokens of a split one after the other, cut into examples of `length`; what remains at the end is dropped.

    Behind each text stands the tokenizer's mark of an end, or what BERT-like ones have between texts. An example may
    hold many short texts, and a text goes on in the next example, whatever the portions in which they are read: only
    one of these is in memory, so that a split may be as large as the disk, and a text as a book.

    Args:
        texts (`DatasetDict`): splits with a column `text`.
        tokenizer (`PreTrainedTokenizerBase`): makes tokens of them.
        length (`int`): tokens of an example.
        characters (`int`): about how many become tokens at a time.

    Returns: the splits with `input_ids` and the same as `labels`.

    Raises:
        ValueError: a split has fewer tokens than an example.
    """
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id

    # A generator, and not a map, whose batches would not know what remains of those before.
    def examples(rows: Dataset) -> Iterator[dict[str, np.ndarray]]:
        rest, too_short = np.empty(0, dtype=np.int32), True
        for portion in portions(rows, characters):
            encoded = tokenizer(portion, add_special_tokens=False, return_attention_mask=False, verbose=False)
            tokens = [np.array([*ids, end], dtype=np.int32) for ids in encoded["input_ids"]]
            stream = np.concatenate([rest, *tokens])
            whole = len(stream) // length * length
            for example in stream[:whole].reshape(-1, length):
                yield {"input_ids": example, "labels": example}
            rest, too_short = stream[whole:], too_short and whole == 0
        if too_short:
            raise ValueError(f"{len(rest)} tokens are less than an example: give more text, or less --block_length")

    try:
        return DatasetDict(
            {split: Dataset.from_generator(examples, gen_kwargs={"rows": rows}) for split, rows in texts.items()}
        )
    except DatasetGenerationError as error:  # which says nothing of what it was made of
        raise error.__cause__ or error from None
