"""What every kept result says about the machine and the versions it was measured with."""

import datetime
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from ..version import __version__

MATRIX_EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def processor_name() -> str:
    """The processor's model name and the extensions that decide how fast it multiplies matrices."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    flags = fields.get("flags", fields.get("Features", "")).split()
    extensions = [name for name in MATRIX_EXTENSIONS if name in flags]
    name = fields.get("model name", platform.machine())
    return f"{name} ({', '.join(extensions)})" if extensions else name


def usable_device(device: str | torch.device | None) -> torch.device:
    """The device to work on, once something was put there.

    Args:
        device (`str` or `torch.device`, *optional*): default: a GPU where there is one, else the CPU.

    Raises:
        ValueError: no such device, or not on this machine.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch built without CUDA
        raise ValueError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    return chosen


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Device, threads, versions and time, as JSON values.

    Args:
        device (`torch.device`, *optional*): where the work is done. Default: the CPU.

    Returns:
        `dict`: `device`, `device_name`, `threads`, `versions`, `platform`, `time` (UTC).
    """
    cuda = device is not None and device.type == "cuda"
    return {
        "device": "cpu" if device is None else device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else processor_name(),
        "threads": torch.get_num_threads(),
        "versions": {
            "hf_effattn": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "platform": f"{platform.system()} {platform.machine()}",
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
