"""Where scripts and tests find the large data sets, which are not part of the repository."""

import os
from pathlib import Path

VARIABLE = "HF_EFFATTN_DATA"


def dataset_path(name: str) -> Path:
    """Path of a file or folder of the data sets.

    Args:
        name (`str`): path inside the data folder, such as `"books"` or `"squad/dev-v1.1.json.gz"`. The folder is
            `$HF_EFFATTN_DATA`, or `shared/data` beside the repository.

    Returns:
        `Path`: an existing file or folder.

    Raises:
        FileNotFoundError: it is not there; the message says what is missing and how to point to it.
    """
    folder = Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[3] / "shared" / "data")
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(
            f"the data set {name!r} is not there: {VARIABLE} should name a folder that holds it"
            f" ({'it is' if os.environ.get(VARIABLE) else 'it is not set, so this was tried:'} {str(folder)!r});"
            " model_cards/RESULTS.md says which files there are"
        )
    return path
