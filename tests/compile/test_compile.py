"""Every kernel, dtype and configuration that dispatch can choose compiles for real GPUs, without one at hand.

Compiled here: every kernel at the commonest head_dim and dtype, and whatever differs from what `compiled.json`
remembers to fit.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPS = HERE.parents[1] / "hf_effattn" / "ops"
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}


def kernels_in_the_package() -> Iterator[str]:
    """Names of all functions that are launched as kernels."""
    for path in OPS.glob("*/triton/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield node.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("gpu", list(SHARED_MEMORY))
def test_kernels_fit_the_gpu(gpu, dtype):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_kernels.py"), gpu, dtype]
    command.append("--again" if dtype == "bfloat16" else "--changed")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = set(kernels_in_the_package())
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == kernels
    compiled = [row for row in rows if "spilled" in row]
    if dtype == "bfloat16":
        assert {row["kernel"] for row in compiled} == kernels
    too_much = [row for row in compiled if row["spilled"] or row["shared"] > SHARED_MEMORY[gpu]]
    assert not too_much, "\n".join(map(str, too_much))
