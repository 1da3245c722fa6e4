"""Memory layouts of tensors: views as rows, 16-byte alignment, and buffers that hold several tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.kernels.launch.cache.capture import is_real
from tokenmix_core.kernels.launch.cache.codegen import next_part
from tokenmix_core.ops.types import Layout


def as_rows(x: Tensor) -> Tensor:
    """Return x `[*, D]` as `[tokens, D]`: a view if tokens have one stride and elements are contiguous, else a copy."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def token_rows(x: Tensor) -> Tensor:
    """Return x `[B, T, D]` if one stride separates all tokens and channels are contiguous; else a contiguous copy."""
    B, T, _ = x.shape
    rows = x.stride(2) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))
    # call `clone`, because `contiguous` returns a single token (T = 1) unchanged, whatever its stride
    return x if rows else x.clone(memory_format=torch.contiguous_format)


class Rows(NamedTuple):
    """Rows in memory: `count` rows of `size` adjacent elements, `stride` elements apart, from the address of `x` on."""

    x: Tensor
    count: int
    size: int
    stride: int


def rows_of(x: Tensor, dims: int = 1) -> Rows:
    """Return x as rows that span its last `dims` dimensions.

    x is copied only if the rows have no common stride or the elements of a row are not adjacent.
    A kernel needs no view of a contiguous x, and a view takes CPU time.
    """
    if x.is_contiguous():
        size = math.prod(x.shape[-dims:])
        return Rows(x, x.numel() // size, size, size)
    rows = as_rows(x if dims == 1 else x.flatten(-dims))
    return Rows(rows, *rows.shape, rows.stride(0))


def contiguous(x: Tensor | None) -> Any:
    """Return x if it is None or contiguous, without a call of torch's dispatcher, else a contiguous copy."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def buffer_views(whole: Tensor, layouts: Iterable[Layout]) -> list[Tensor]:
    """Return consecutive views of the byte buffer `whole`, one per layout: autograd then saves one tensor, not many."""
    start, parts, typed = 0, [], {}
    for shape, dtype in layouts:
        # one view for each dtype and one for each part, since every view takes CPU time
        if dtype not in typed:
            typed[dtype] = whole.view(dtype)
        strides = tuple(accumulate(shape[:0:-1], mul, initial=1))[: len(shape)][::-1]
        offset = typed[dtype].storage_offset() + start // dtype.itemsize
        parts.append(typed[dtype].as_strided(shape, strides, offset))
        start = next_part(start + math.prod(shape) * dtype.itemsize)
    return parts


def buffer_bytes(layouts: Iterable[Layout]) -> int:
    """Return the size in bytes of the buffer that `buffer_views` splits into these layouts."""
    return sum(next_part(math.prod(shape) * dtype.itemsize) for shape, dtype in layouts)


def aligned(x: Tensor | None) -> Any:
    """Return x if it is contiguous and starts at a multiple of 16 bytes, else a copy; a slice may start anywhere.

    Kernels copy 16 bytes at a time into shared memory, and Triton compiles a kernel again for another alignment.
    """
    if x is None or (x.is_contiguous() and (not is_real(x) or x.data_ptr() % 16 == 0)):
        return x
    return x.clone(memory_format=torch.contiguous_format)
