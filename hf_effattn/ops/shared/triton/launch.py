"""How the kernels are launched: what Triton finds out about the arguments once is not found out again."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Arguments that change with the length of the inputs or with their number. Triton must not compile a kernel again
# where one of them is 1 or a multiple of 16. It may for the length itself, as that saves registers.
LENGTHS = (
    *("numbers", "columns", "slots", "tiles", "blocks", "splits", "first_row", "last_row", "slices"),
    *("first_share", "fit_rows", "seed", "bin_keys", "block_rows"),
    *("first_late", "first_segment", "segments", "places"),
)
REMEMBERS = torch.version.hip is None  # AMD's kernels are compiled for the sizes of tensors, too
MOST_REMEMBERED = 256  # launches of a kernel, so that lengths that come only once do not fill the memory
ALIGNMENT = 16  # bytes; Triton compiles for tensors that begin at a multiple, and for others


class Kernel(JITFunction):
    """A kernel that remembers what it was compiled to, by the numbers and the kinds of tensors that it was given.

    Triton derives that from the arguments at every launch, on the host, which takes longer than the rest of it, and a
    layer is a dozen or two launches. Hooks of a launch run; those before it, and settings for debugging that come
    later, do not.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        # What it was compiled to, and the names of the arguments that are given by name, in its order.
        self.remembered: dict[tuple[Any, ...], tuple[Any, list[str]]] = {}

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> Any:
        """Launch on a grid, on the GPU that holds the tensors, or with `warmup` only compile.

        Triton launches on the current GPU, whatever the tensors are on. An empty grid launches nothing.
        """
        if 0 in grid:
            return None
        device = driver.active.get_current_device()
        held_by = next((x.device for x in (*args, *named.values()) if isinstance(x, torch.Tensor) and x.is_cuda), None)
        if held_by is not None and held_by.index != device:
            with torch.cuda.device(held_by):
                return self.run(*args, grid=grid, warmup=warmup, **named)
        if warmup or not REMEMBERS:
            return super().run(*args, grid=grid, warmup=warmup, **named)
        kinds = [
            (x.dtype, x.data_ptr() % ALIGNMENT == 0) if isinstance(x, torch.Tensor) else (x, type(x))
            for x in (*args, *named.values())
        ]
        key = device, *named, *kinds
        remembered = self.remembered.get(key)
        if remembered is not None:
            compiled, names = remembered
            compiled[(*grid, 1, 1)[:3]](*args, *[named[name] for name in names])
            return compiled
        compiled = super().run(*args, grid=grid, warmup=False, **named)
        if compiled is not None:
            if len(self.remembered) >= MOST_REMEMBERED:
                self.remembered.clear()
            self.remembered[key] = compiled, self.arg_names[len(args) :]
        return compiled


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator of what is launched; functions that kernels call have `triton.jit`."""
    if knobs.runtime.interpret:  # as triton.jit decides
        return triton.jit(function, do_not_specialize=LENGTHS)
    return Kernel(function, do_not_specialize=LENGTHS)
