"""The kernel of `padding.zero_padding`."""

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.launcher import cached_launch

# maximum number of tensors in one launch; elements that a program writes at a time
MOST, _BLOCK = 7, 1024
_SIZES = [f"{name}{i}" for i in range(MOST) for name in ("inner", "outer")]


@triton.jit
def _zero_range(x, start, end, block, blocks_at_once, BLOCK: tl.constexpr):
    """Zero `x[start:end]`: write each `blocks_at_once`-th block from `block` on; if `block` is 0, also both ends."""
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], x.dtype.element_ty)
    # full blocks begin at multiples of 16 elements and need no mask, so each thread can store 16 bytes at a time
    aligned = tl.minimum(tl.cdiv(start, 16) * 16, end)
    full = (end - aligned) // BLOCK
    for i in range(block, full, blocks_at_once):
        tl.store(x + tl.multiple_of(aligned + i * BLOCK, 16) + lanes, zeros)
    if block == 0:
        tl.store(x + start + lanes, zeros, mask=start + lanes < aligned)
        rest = aligned + full * BLOCK
        tl.store(x + rest + lanes, zeros, mask=rest + lanes < end)


@triton.jit
def _zero_rows(x, inner, outer, last, T, BLOCK: tl.constexpr):
    """Zero `x[:, last:]` of x `[outer, T, inner]`; do nothing if x is None."""
    if x is not None:
        program, programs = tl.program_id(0), tl.num_programs(0)
        first, padding = last * inner, (T - last) * inner
        if outer == 1:
            _zero_range(x, first, first + padding, program, programs, BLOCK)
        else:
            for row in range(program, outer, programs):
                start = row * (first + padding) + first
                _zero_range(x, start, start + padding, 0, 1, BLOCK)


@cached_launch
@triton.jit(do_not_specialize=["N", "added", "T", *_SIZES])
def _zero_padding_kernel(
    cu_seqlens, N, added, T, x0, x1, x2, x3, x4, x5, x6, inner0, inner1, inner2, inner3, inner4, inner5, inner6,
    outer0, outer1, outer2, outer3, outer4, outer5, outer6, BLOCK: tl.constexpr,
):  # fmt: skip
    last = tl.load(cu_seqlens + N).to(tl.int64) + added
    _zero_rows(x0, inner0, outer0, last, T, BLOCK)
    _zero_rows(x1, inner1, outer1, last, T, BLOCK)
    _zero_rows(x2, inner2, outer2, last, T, BLOCK)
    _zero_rows(x3, inner3, outer3, last, T, BLOCK)
    _zero_rows(x4, inner4, outer4, last, T, BLOCK)
    _zero_rows(x5, inner5, outer5, last, T, BLOCK)
    _zero_rows(x6, inner6, outer6, last, T, BLOCK)


def launch(cu_seqlens: Tensor, tensors: list[Tensor], added: int) -> None:
    """Zero the rows from `cu_seqlens[-1] + added` on of up to `MOST` tensors `[1, T, ...]` (see `zero_padding`)."""
    T = tensors[0].shape[1]
    given = {}
    for i in range(MOST):
        x = tensors[i] if i < len(tensors) else None
        rows, tokens_last = (0, False) if x is None else (x.numel() // T, not x.is_contiguous())
        assert x is None or not tokens_last or (x.stride(1) == 1 and x.transpose(1, -1).is_contiguous())
        given |= {f"x{i}": x, f"inner{i}": 1 if tokens_last else rows, f"outer{i}": rows if tokens_last else 1}
    _zero_padding_kernel[(min(cdiv(T, 64), 256),)](
        cu_seqlens=cu_seqlens, N=len(cu_seqlens) - 1, added=added, T=T, **given, BLOCK=_BLOCK, num_warps=4
    )
