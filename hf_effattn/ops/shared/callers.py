"""Where a user's code called: what a warning from deep inside a model points at."""

import sys

# Packages between a user's call of a model and an attention op.
PASSED_THROUGH = frozenset({"accelerate", "hf_effattn", "peft", "sentence_transformers", "torch", "transformers"})


def stacklevel_of_user() -> int:
    """`stacklevel` of `warnings.warn` for the function that asks: the innermost frame that is no library's.

    Where there is none, as in a thread of autograd, it is that function. From Python 3.12 on `skip_file_prefixes` of
    `warnings.warn` does the same; 3.11 is served, too.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_THROUGH:
        if frame.f_back is None:
            return 1
        frame, level = frame.f_back, level + 1
    return level
