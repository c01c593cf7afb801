"""Patching: an efficient attention method in place of a pretrained model's own, on one instance, and back."""

from .extending import extend_positions
from .interface.attention_function import register
from .loading import from_pretrained
from .measured import measured_error
from .measurements import MeasuredError
from .methods import list_methods, make_method
from .patch import patch_attention, unpatch_attention
from .tensor_parallel import parallelize

register()

__all__ = [
    "MeasuredError",
    "extend_positions",
    "from_pretrained",
    "list_methods",
    "make_method",
    "measured_error",
    "parallelize",
    "patch_attention",
    "unpatch_attention",
]
