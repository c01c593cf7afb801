"""Running text for language models: from the Hub or from files, cut into examples of one length."""

from dataclasses import dataclass, field
from itertools import chain

from datasets import DatasetDict, load_dataset
from gutenberg import GUTENBERG
from transformers import PreTrainedTokenizerBase

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


def load_texts(arguments: DataArguments) -> DatasetDict:
    """The splits `train` and `validation` with a column `text`, a document or a line a row."""
    if arguments.dataset_name is not None:
        return load_dataset(arguments.dataset_name, arguments.dataset_config_name)
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


def blocks(texts: DatasetDict, tokenizer: PreTrainedTokenizerBase, length: int) -> DatasetDict:
    """All tokens of a split one after the other, cut into examples of `length`; what remains is dropped.

    Behind each text stands the tokenizer's mark of an end, or what BERT-like ones have between texts.
    """
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer(rows["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return {"input_ids": [[*tokens, end] for tokens in found]}

    def cut(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain.from_iterable(rows["input_ids"]))
        examples = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
        return {"input_ids": examples, "labels": [list(example) for example in examples]}

    columns = texts["train" if "train" in texts else "validation"].column_names
    return texts.map(tokenize, batched=True, remove_columns=columns).map(cut, batched=True, batch_size=None)
