"""What the kernels must know about the chip they run on, and its compiler."""

from dataclasses import dataclass
from functools import cache

import torch

KIB = 1024
HAS_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")
REGISTERS = 64 * KIB  # of all threads of a program, on NVIDIA's chips


@dataclass(frozen=True)
class Chip:
    """A kind of chip, as far as block sizes depend on it."""

    name: str  # `"cuda"` for NVIDIA, `"hip"` for AMD
    shared_memory: int  # bytes of shared memory that one program can have

    @property
    def is_large(self) -> bool:
        """Whether products of 16-bit numbers read them from shared memory, as Hopper's do, and registers are free."""
        return self.name == "cuda" and self.shared_memory > 200 * KIB

    @property
    def all_registers(self) -> dict[str, int]:
        """Option of a launch of up to 8 warps that lets a program use all registers it can have.

        Left to itself, NVIDIA's assembler spills a few where that lets one more program run beside.
        """
        return self.registers(8)

    def registers(self, num_warps: int) -> dict[str, int]:
        """The same for any number of warps: with more registers than a chip has for all, a program does not start."""
        return {"maxnreg": min(255, REGISTERS // (32 * num_warps))} if self.name == "cuda" else {}

    def dot_precision(self, dtype: torch.dtype) -> str:
        """How `tl.dot` multiplies numbers that were loaded as `dtype`: float32 as precisely as torch itself does."""
        if dtype != torch.float32:
            return "tf32" if self.name == "cuda" else "ieee"
        if self.name != "cuda":
            return "ieee"
        # Three products of halves of the numbers reach float32's precision on the tensor cores.
        return "tf32" if tf32_allowed() else "tf32x3"


def tf32_allowed() -> bool:
    """Whether torch multiplies float32 matrices in TF32; reading the old switch may raise where there is a new one."""
    matmul = torch.backends.cuda.matmul
    return bool(matmul.fp32_precision == "tf32" if HAS_PRECISION else matmul.allow_tf32)


def block_width(dim: int) -> int:
    """Columns of a block that holds rows of `dim` numbers and can be multiplied: a power of two, 16 or more."""
    return max(16, 1 << (dim - 1).bit_length())


# What the interpreter runs as: the smallest of the chips.
INTERPRETER = Chip("hip", 64 * KIB)


def chip_of(tensor: torch.Tensor) -> Chip:
    """The chip that holds a tensor."""
    return _chip(tensor.device.index or 0) if tensor.is_cuda else INTERPRETER


@cache
def _chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Chip("hip", properties.shared_memory_per_block)
    # What a program can have on request; torch versions that don't tell say at least what it has without.
    most = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Chip("cuda", most)
