#!/usr/bin/env bash
# Triton's interpreter (TRITON_INTERPRET=1) refuses a mask in which a block's comparison meets a number's, from 3.9.0 on.
#
# Ran: a kernel that loads with mask=(offsets < n) & (first > 0), a common way to skip a load, on a CPU with torch 2.13.0.
# Seen: Triton 3.7.0 loads. Triton 3.9.0 raises InterpreterError: ValueError('mask has unsupported dtype'): the comparison
# of two numbers keeps the type of the numbers (int32), is spread over the block as integers, and makes the mask integers.
# Written as mask=(offsets < n) & ((offsets * 0 + first) > 0), block against block, both load. A compiled kernel takes both.
# Expected before running: the same in both versions.
# Exits non-zero if that changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$place/run.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def add_one(pointer, n, first, BLOCKS: tl.constexpr):
    offsets = tl.arange(0, 8)
    if BLOCKS:
        mask = (offsets < n) & ((offsets * 0 + first) > 0)
    else:
        mask = (offsets < n) & (first > 0)
    values = tl.load(pointer + offsets, mask=mask, other=0.0)
    tl.store(pointer + offsets, values + 1, mask=offsets < n)


for blocks in (True, False):
    try:
        numbers = torch.arange(8.0)
        add_one[(1,)](numbers, 5, 1, blocks)
        print(triton.__version__, "block against block" if blocks else "a number", "loads", numbers.tolist())
    except Exception as error:
        print(triton.__version__, "block against block" if blocks else "a number", "raises", error)
PYTHON
for version in 3.7.0 3.9.0; do
    "$place/venv/bin/pip" install --quiet --no-deps "triton==$version"
    TRITON_INTERPRET=1 "$place/venv/bin/python" "$place/run.py" 2>&1 | grep "^$version" | tee -a "$place/seen"
done
grep -q "^3.7.0 a number loads" "$place/seen"
grep -q "^3.9.0 block against block loads" "$place/seen"
grep -q "^3.9.0 a number raises .*mask has unsupported dtype" "$place/seen"
