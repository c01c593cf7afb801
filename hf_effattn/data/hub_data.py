"""Data sets of the Hub: one that cannot be reached is told with what else can be done."""

from typing import Any

from datasets import load_dataset
from huggingface_hub.errors import HFValidationError


def load_from_hub(name: str, configuration: str | None = None, *, instead: str, split: str | None = None) -> Any:
    """What `datasets.load_dataset` returns: all splits, or one.

    Args:
        name (`str`): of the data set.
        configuration (`str`, *optional*): of the data set.
        instead (`str`): the options that name files of one's own, for the message.
        split (`str`, *optional*): one alone. Default: all.

    Raises:
        FileNotFoundError: no such data set, or no way to the Hub and no copy from an earlier run.
    """
    try:
        return load_dataset(name, configuration, split=split)
    except (ConnectionError, FileNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(
            f"the data set {name!r} cannot be had from the Hub ({error}): check its name and the network (at first "
            f"HF_HUB_OFFLINE must not be set, later a copy is kept), or name your own files with {instead}"
        ) from None
