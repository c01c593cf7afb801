"""Patching: an efficient attention method in place of a pretrained model's own, on one instance, and back."""

from .attention import register
from .extending import extend_positions
from .loading import from_pretrained
from .methods import Method, list_methods, make_method
from .patch import patch_attention, unpatch_attention

register()

# Under these names too.
make_settings = make_method
run_method = Method.run

__all__ = [
    "extend_positions",
    "from_pretrained",
    "list_methods",
    "make_method",
    "make_settings",
    "patch_attention",
    "run_method",
    "unpatch_attention",
]
