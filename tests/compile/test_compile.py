"""Every kernel, dtype and configuration that dispatch can choose compiles for real GPUs, without one at hand.

Compiled here: whatever differs from what `compiled.json` remembers to fit, and the hot kernels anew.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent
OPS = HERE.parents[1] / "hf_effattn" / "ops"


def kernels_in_the_package() -> Iterator[str]:
    """Names of all functions that are launched as kernels."""
    for path in OPS.glob("*/triton/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield node.name


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "gfx942"])
def test_kernels_fit_the_gpu(gpu):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_kernels.py"), gpu, "bfloat16,float16,float32", "--changed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == set(kernels_in_the_package())
    too_much = [row for row in rows if "spilled" in row and not row["fits"]]
    assert not too_much, "\n".join(map(str, too_much))


@pytest.mark.slow
def test_hot_kernels_are_what_they_were():
    """Registers, blocks side by side, tensor-core instructions and vector loads, as `machine_code.json` has them."""
    recorded = json.loads((HERE / "machine_code.json").read_text())
    if recorded["triton"] != triton.__version__:
        pytest.skip(f"recorded with Triton {recorded['triton']}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "machine_code.py"), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout)
    assert compiled.keys() == recorded.keys()
    for layer, launches in recorded["layers"].items():
        assert [launch["kernel"] for launch in compiled["layers"][layer]] == [launch["kernel"] for launch in launches]
        for launch, expected in zip(compiled["layers"][layer], launches, strict=True):
            assert launch == expected, layer
