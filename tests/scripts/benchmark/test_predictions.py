"""What the predictions count is what the programs do."""

import pytest
import torch
import triton
import triton.language as tl

from scripts.benchmark.predictions import HEADS, Launch, counting, exact_seconds

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="programs are counted in Triton's interpreter")


@triton.jit
def _square_kernel(a_ptr, out_ptr):
    """`A A` of each program's own `(16, 16)` matrix."""
    o = tl.program_id(0) * 256 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    b_a = tl.load(a_ptr + o)
    tl.store(out_ptr + o, tl.dot(b_a, b_a))


def test_programs_of_the_first_head_stand_for_all():
    a, out = torch.randn(2 * HEADS, 16, 16), torch.zeros(2 * HEADS, 16, 16)
    with counting() as counts:
        _square_kernel[(2 * HEADS,)](a, out)
        total = out.sum()
    kernel, sum_of_torch = counts.launches
    assert (kernel.kernel, kernel.programs, kernel.counted) == ("_square_kernel", 2 * HEADS, 2)
    assert kernel.moved == 2 * 2 * 256 * 4
    assert (kernel.products_2, kernel.products_4) == (0, 2 * 2 * 16**3)
    assert kernel.tensors == a.nbytes + out.nbytes
    torch.testing.assert_close(out[:2], a[:2] @ a[:2])
    assert not out[2:].any()
    assert (sum_of_torch.kernel, sum_of_torch.moved) == ("torch: sum", out.nbytes + total.nbytes)


def test_the_interpreter_is_as_it_was_behind_it():
    a, out = torch.randn(2 * HEADS, 16, 16), torch.zeros(2 * HEADS, 16, 16)
    with pytest.raises(ZeroDivisionError), counting():
        raise ZeroDivisionError
    _square_kernel[(2 * HEADS,)](a, out)
    torch.testing.assert_close(out, a @ a)


def test_a_launch_takes_the_longest_of_what_it_waits_for():
    nothing = Launch("nothing").seconds(1)
    assert Launch("memory", tensors=10**9, moved=10**9).seconds(1) > 50 * nothing
    assert Launch("products", products_2=10**12).seconds(1) > 50 * nothing
    chain = Launch("chain", programs=1000, counted=1000, chain=1e9, longest=1e6)
    assert chain.seconds(2) == pytest.approx(chain.seconds(1) / 2, rel=0.01)
    assert exact_seconds(2048, backward=False) == pytest.approx(exact_seconds(1024, backward=False) * 4)
