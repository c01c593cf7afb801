"""Why attention stays exact under every method, or is cheaper exactly: a class for each reason.

A stack has one of them, by its row in the table of model types and its config. To add a kind write its class, put it
into `KINDS` and name it in the rows of the model types.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from ..model_types.table import MODEL_TYPES
from ..position_rows import READ_BY
from ..transformers_internals import implementation_of, set_implementation, supports_sdpa
from .windows import is_longer_than_inputs

# What modules with a forward of their own call their windows or blocks: Longformer and LED, LongT5, Pegasus-X.
_OWN_WINDOWS = "one_sided_attn_window_size", "local_radius", "block_size"


@dataclass(frozen=True)
class ExactKind:
    """Attention by transformers' attention function. A method serves it, except in layers with a sliding window.

    Attention sinks (gpt-oss) are among it: a method serves them, and SDPA does with one key more.

    Args:
        model (`PreTrainedModel`): of the stack.
        modules (`tuple[nn.Module, ...]`): its self-attention modules.
    """

    model: PreTrainedModel
    modules: tuple[nn.Module, ...]

    has_own_forward: ClassVar[bool] = False  # whether its modules do not call transformers' attention function
    is_recorded: ClassVar[bool] = True  # whether `measuring/recording.py` computes the exact attention of its layers

    @property
    def why(self) -> str:
        """What its layers do that no method serves, for messages."""
        return "see a sliding window only"

    @property
    def saves(self) -> str:
        """How the layers that stay exact run, for messages."""
        return "in blocks"

    @property
    def baseline(self) -> str:
        """The attention implementation of the exact model; transformers' SDPA path has no attention sinks."""
        return "sdpa" if supports_sdpa(type(self.model)) else "eager"

    def serves(self, module: nn.Module) -> bool:
        """Whether a method serves a module; all others stay exact."""
        return self.window_of(module) is None

    def window_of(self, module: nn.Module) -> int | None:
        """The window of a module: all of it, or what reaches backwards; of chunks their length (Llama 4)."""
        if not getattr(module, "is_sliding", True):  # EXAONE names the window in its full layers, too
            return None
        config: Any = getattr(module, "config", None)  # of one layer, where they differ
        in_config = MODEL_TYPES[self.model.config.model_type].window_in_config
        window = self._stated_window(config if in_config else module)
        kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
        if window is None and kinds is not None and index is not None and kinds[index] == "chunked_attention":
            window = config.attention_chunk_size
        return None if window is None or is_longer_than_inputs(window, config) else window

    def _stated_window(self, of: Any) -> int | None:
        return getattr(of, "sliding_window", None)

    @property
    def windows(self) -> list[int]:
        """The windows of the modules that have one."""
        return [window for module in self.modules if (window := self.window_of(module)) is not None]

    def gains(self, length: int | None = None) -> bool:
        """Whether a patch saves time without approximating.

        Args:
            length (`int`, *optional*): on so many tokens. Blocks need two windows.
        """
        return self.baseline == "eager" or any(length is None or length >= 2 * window for window in self.windows)

    def check(self) -> None:
        """Raise where the model that a patch would keep exact is not the one that was trained."""

    def switch(self, implementation: str, *, on: bool) -> None:
        """Set the attention implementation, also in copies of the config that modules hold.

        Args:
            implementation (`str`): its name.
            on (`bool`): whether the cheaper exact attention is to run, as under every method.
        """
        self.model.set_attn_implementation(implementation)
        for module in self.modules:
            config: Any = getattr(module, "config", self.model.config)
            if config is not self.model.config:
                set_implementation(config, implementation)


class Softcap(ExactKind):
    """Scores are bounded by a tanh (Gemma 2)."""

    is_recorded = False

    @property
    def why(self) -> str:
        return "bound their scores by a tanh"

    @property
    def baseline(self) -> str:
        return "eager"

    def serves(self, module: nn.Module) -> bool:
        return False

    def check(self) -> None:
        if implementation_of(self.model.config) == "sdpa":
            raise ValueError(
                f'{type(self.model).__name__} runs "sdpa", which drops the tanh that bounds its scores '
                "(config.attn_logit_softcapping): it is not the model that was trained. Load it with "
                'attn_implementation="eager", then patch it'
            )


class OwnForward(ExactKind):
    """Modules whose forward calls no function of attention: a patch gives them another class."""

    has_own_forward = True
    is_recorded = False

    def switch(self, implementation: str, *, on: bool) -> None:
        from .architectures import swap_classes  # reads modelling files of transformers, which others go without

        swap_classes(self.model, self.modules, on=on)
        # Its config keeps its own, unless transformers' switch has set a method, which a decoder beside it may call.
        if not on and implementation_of(self.model.config) in READ_BY:
            super().switch(implementation, on=on)


class OwnWindows(OwnForward):
    """Windows in a forward of its own (Longformer, LED, LongT5, Pegasus-X)."""

    def _stated_window(self, of: Any) -> int | None:
        return next(getattr(of, name) for name in _OWN_WINDOWS if hasattr(of, name))


class DistanceBiases(OwnForward):
    """Biases of distances in a forward of its own (T5, MPNet, DeBERTa, Parakeet, Wav2Vec2-BERT)."""

    @property
    def knows_distances(self) -> bool:
        """Whether its scores have such biases, by its config: Wav2Vec2-BERT and DeBERTa need not."""
        config = self.model.config
        by_distance = getattr(config, "position_embeddings_type", "relative") not in (None, "rotary")
        return by_distance and bool(getattr(config, "relative_attention", True))

    @property
    def why(self) -> str:
        return "add biases of distances" if self.knows_distances else "compute their attention themselves"

    @property
    def saves(self) -> str:
        return "without a matrix of them" if self.knows_distances else "by SDPA"

    def serves(self, module: nn.Module) -> bool:
        return False

    def gains(self, length: int | None = None) -> bool:
        return self.knows_distances or super().gains(length)

    def switch(self, implementation: str, *, on: bool) -> None:
        # Masks are made by the configs of the parts; a method's are `(B, N)`. A decoder has a config of its own.
        parts = [part for part in self.model.modules() if isinstance(part, PreTrainedModel)]
        innermost = {module: part for part in parts for module in part.modules()}
        for part in {innermost[module] for module in self.modules}:
            set_implementation(part.config, implementation)
        super().switch(implementation, on=on)


class SeveralImages(ExactKind):
    """Images of a call are read as one sequence (Pixtral): a patch tells the layers where each of them begins."""

    def gains(self, length: int | None = None) -> bool:
        return True

    def switch(self, implementation: str, *, on: bool) -> None:
        from .architectures.pixtral import read_apart

        read_apart(self.model, apart=on)
        super().switch(implementation, on=on)


KINDS: dict[str, type[ExactKind]] = {"windows": OwnWindows, "biases": DistanceBiases, "images": SeveralImages}


def kind_of(config: Any) -> type[ExactKind]:
    """The kind of a stack, by the row of its model type and its config."""
    softcap = getattr(config, "attn_logit_softcapping", None)
    return KINDS.get(MODEL_TYPES[config.model_type].exact_kind, ExactKind if softcap is None else Softcap)
