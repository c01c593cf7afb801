"""How the kernels are launched."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .recorded import recorder

# Arguments that change with the length of the inputs or with their number. Triton must not compile a kernel again
# where one of them is 1 or a multiple of 16. It may for the length itself, as that saves registers.
LENGTHS = (
    *("numbers", "columns", "slots", "tiles", "blocks", "splits", "first_row", "last_row", "slices"),
    *("first_share", "fit_rows", "seed", "bin_keys", "block_rows"),
    *("first_late", "first_segment", "segments", "places"),
)


class Kernel(JITFunction):
    """A kernel that runs on the GPU that holds its tensors, and tells the recorder of a call what it launches."""

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
        compiled = super().run(*args, grid=grid, warmup=warmup, **named)
        if (now := recorder()) is not None and not warmup:
            now.launched(compiled, grid, [*args, *(named[name] for name in self.arg_names[len(args) :])])
        return compiled


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator of what is launched; functions that kernels call have `triton.jit`."""
    if knobs.runtime.interpret:  # as triton.jit decides
        return triton.jit(function, do_not_specialize=LENGTHS)
    return Kernel(function, do_not_specialize=LENGTHS)
