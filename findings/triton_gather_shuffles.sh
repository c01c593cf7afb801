#!/usr/bin/env bash
# triton 3.7.1 and 3.9.0: the same `tl.gather` of rows becomes 8 times as many warp shuffles in the newer one.
#
# A program takes 512 rows of 16 numbers from a table of 64 rows that it holds, with 8 warps, compiled for an NVIDIA
# chip of capability 9.0 (no GPU is needed to compile). Which lanes hold which row of the table is the compiler's choice.
# 3.7.1 lays the table out so that a lane asks few others; 3.9.0 asks each lane in turn. It is not always the worse one:
# of a table of 16 rows 3.9.0 needs no shuffle, where 3.7.1 has 32. Inside a kernel that holds more, the same change
# raises the registers: a kernel of ours with such a gather spilled none before and 216 bytes after.
#
# Output seen:
#   3.7.1: 64 rows, 64 shuffles; 16 rows, 32 shuffles
#   3.9.0: 64 rows, 512 shuffles; 16 rows, 0 shuffles
# Exits 1 when the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/take_rows.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def take_rows(table_ptr, index_ptr, out_ptr, ROWS: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    table = tl.load(table_ptr + tl.arange(0, ROWS)[:, None] * WIDTH + columns[None, :])
    taken = tl.arange(0, TAKEN)
    index = tl.broadcast_to(tl.load(index_ptr + taken)[:, None], [TAKEN, WIDTH])
    tl.store(out_ptr + taken[:, None] * WIDTH + columns[None, :], tl.gather(table, index, 0))


counts = []
for rows in (64, 16):
    sizes = {"ROWS": rows, "TAKEN": 512, "WIDTH": 16}
    types = {"table_ptr": "*fp32", "index_ptr": "*i32", "out_ptr": "*fp32"} | dict.fromkeys(sizes, "constexpr")
    source = ASTSource(take_rows, types, constexprs=sizes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    counts.append(f"{rows} rows, {compiled.asm['ptx'].count('shfl.sync')} shuffles")
print(f"{triton.__version__}: {'; '.join(counts)}")
PYTHON
for version in 3.7.1 3.9.0; do python3 -m venv "$folder/$version"; done
"$folder/3.7.1/bin/pip" install --quiet "triton==3.7.1"
"$folder/3.9.0/bin/pip" install --quiet "triton==3.9.0"
for version in 3.7.1 3.9.0; do
    TRITON_CACHE_DIR="$folder/cache" "$folder/$version/bin/python" -W ignore "$folder/take_rows.py"
done | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
3.7.1: 64 rows, 64 shuffles; 16 rows, 32 shuffles
3.9.0: 64 rows, 512 shuffles; 16 rows, 0 shuffles
SEEN
