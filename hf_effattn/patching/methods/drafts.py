"""What a model whose prompts are clustered whole is told in assisted generation: that its last tokens are drafts."""

from typing import Any

from torch import nn

# Among what a model hands down to its attention, as it does `use_cache`.
READS_DRAFTS = "effattn_reads_drafts"
_HANDLE = "_effattn_draft_hook"


def _tell_attention(model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook: say so where the outputs of more than the last token are asked for (`logits_to_keep`)."""
    kept = options.get("logits_to_keep")
    last_alone = kept is None or (isinstance(kept, int) and kept == 1)
    return args, options if last_alone else options | {READS_DRAFTS: True}


def watch_for_drafts(model: nn.Module, watch: bool) -> None:
    """Let a model tell its attention of drafts, or no longer.

    Assisted generation hands over the prompt with guesses of the next tokens behind it, and keeps those that the
    outputs agree with; these must not depend on the guesses.
    """
    watches = _HANDLE in vars(model)
    if watch and not watches:
        setattr(model, _HANDLE, model.register_forward_pre_hook(_tell_attention, with_kwargs=True))
    elif watches and not watch:
        vars(model).pop(_HANDLE).remove()
