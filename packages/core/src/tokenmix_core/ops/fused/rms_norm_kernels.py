"""Triton kernels of RMS norms with an optional residual branch and gate, and autograd functions for eager mode."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.kernels.launch.cache.row_calls import RowCall
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.kernels.triton.activations import sigmoid
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import contiguous, rows_of


@triton.jit
def locate(i_block, rows, groups, i_g, BM: tl.constexpr, PARTS: tl.constexpr):
    """Return the indices of a block's rows, their tokens and groups, and the mask of rows that exist.

    A token has `groups` rows, which are normalised separately. With PARTS each group has its own weights, so all rows
    of a block belong to one group, `i_g`.
    """
    o_r = (i_block * BM + tl.arange(0, BM)).to(tl.int64)
    m_r = o_r < rows
    if PARTS:
        return o_r * groups + i_g, o_r, tl.zeros([BM], tl.int64) + i_g, m_r
    return o_r, o_r // groups, o_r % groups, m_r


@triton.jit
def norm_factor(b_h, eps, SIZE: tl.constexpr):
    """Return (mean(h²) + eps)^−½ of each row of a tile, `[BM, 1]`."""
    return tl.rsqrt(tl.sum(b_h * b_h, 1) / SIZE + eps)[:, None]


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, branch, z, weight, total, y, stride_x, stride_branch, stride_z, rows, groups, eps,
    SIZE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Normalise a block of rows; with a branch, normalise x + branch and also store this sum in `total`.

    BEFORE, AFTER: whether the gate silu(z) multiplies the norm's input or output; PARTS: each group has its own weight.
    """
    gdc_launch_and_wait(PDL)
    i_g = tl.program_id(1)
    o_row, o_t, o_g, m_r = locate(tl.program_id(0), rows, groups, i_g, BM, PARTS)
    o_d = tl.arange(0, BD)
    mask = m_r[:, None] & (o_d < SIZE)[None, :]
    columns = (o_g * SIZE)[:, None] + o_d[None, :]
    flat = (o_row * SIZE)[:, None] + o_d[None, :]
    b_h = tl.load(x + (o_t * stride_x)[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
    if branch is not None:
        b_h += tl.load(branch + (o_t * stride_branch)[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
        b_total = b_h.to(total.dtype.element_ty)
        tl.store(total + flat, b_total, mask=mask)
        # normalise the sum after rounding to its dtype: the backward pass reads the rounded sum
        b_h = b_total.to(tl.float32)
    if z is not None:
        b_z = tl.load(z + (o_t * stride_z)[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
        b_gate = b_z * sigmoid(b_z)
        if BEFORE:
            b_h *= b_gate
    b_w = tl.load(weight + (i_g * SIZE if PARTS else 0) + o_d, mask=o_d < SIZE, other=0.0).to(tl.float32)
    b_y = b_h * norm_factor(b_h, eps, SIZE) * b_w[None, :]
    if AFTER:
        b_y *= b_gate
    tl.store(y + flat, b_y.to(y.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    h, z, weight, dy, dtotal, dx, dbranch, dz, dweights, stride_h, stride_z, stride_dy, stride_dtotal, rows, groups,
    eps, SIZE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Compute the gradients for every num_programs-th block of rows; store this program's sum of weight gradients.

    Flags are those of `rms_norm_kernel`.
    """
    i_p, i_g = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d = o_d < SIZE
    b_w = tl.load(weight + (i_g * SIZE if PARTS else 0) + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_dw = tl.zeros([BM, BD], tl.float32)
    for i_block in range(i_p, tl.cdiv(rows, BM), tl.num_programs(0)):
        o_row, o_t, o_g, m_r = locate(i_block, rows, groups, i_g, BM, PARTS)
        mask = m_r[:, None] & m_d[None, :]
        columns = (o_g * SIZE)[:, None] + o_d[None, :]
        flat = (o_row * SIZE)[:, None] + o_d[None, :]
        b_x = tl.load(h + (o_t * stride_h)[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + (o_t * stride_dy)[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
        b_h = b_x
        if z is not None:
            b_z = tl.load(z + (o_t * stride_z)[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
            b_sigmoid = sigmoid(b_z)
            b_gate = b_z * b_sigmoid
            b_slope = b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
            if BEFORE:
                b_h = b_x * b_gate
        b_r = norm_factor(b_h, eps, SIZE)
        b_n = b_h * b_r
        if AFTER:
            tl.store(dz + flat, (b_dy * b_w * b_n * b_slope).to(dz.dtype.element_ty), mask=mask)
            b_dy *= b_gate
        b_dw += b_dy * b_n
        b_dn = b_dy * b_w
        b_dh = b_r * (b_dn - b_n * (tl.sum(b_dn * b_n, 1) / SIZE)[:, None])
        if BEFORE:
            tl.store(dz + flat, (b_dh * b_x * b_slope).to(dz.dtype.element_ty), mask=mask)
            b_dh *= b_gate
        if dtotal is not None:
            b_dh += tl.load(dtotal + (o_t * stride_dtotal)[:, None] + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + flat, b_dh.to(dx.dtype.element_ty), mask=mask)
        if dbranch is not None:
            tl.store(dbranch + flat, b_dh.to(dbranch.dtype.element_ty), mask=mask)
    p_dw = dweights + (i_p * tl.num_programs(1) + i_g) * SIZE + o_d
    tl.store(p_dw, tl.sum(b_dw, 0), mask=m_d)


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return x as rows with one stride between them, and this stride; None and 0 for None."""
    if x is None:
        return None, 0
    rows = rows_of(x)
    return rows.x, rows.stride


def _run(x, branch, z, weight, eps, size, before, dtype) -> tuple[Tensor, ...]:
    """Return y and, if there is a branch, x + branch; all are `[*, groups · size]`.

    If `before`, the gate silu(z) multiplies the norm's input, else its output.
    """
    groups, parts, before = x.shape[-1] // size, len(weight) // size, before and z is not None
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = None
    if branch is not None:
        wide = x.dtype if x.dtype == branch.dtype else torch.promote_types(x.dtype, branch.dtype)
        total = torch.empty(x.shape, dtype=wide, device=x.device)
    rows, tile = x.numel() // size // parts, tuning.row_tile(size)
    (x, stride_x), (branch, stride_branch), (z, stride_z) = map(_rows, (x, branch, z))
    rms_norm_kernel[(cdiv(rows, tile.BM), parts)](
        x=x, branch=branch, z=z, weight=contiguous(weight), total=total, y=y, stride_x=stride_x,
        stride_branch=stride_branch, stride_z=stride_z, rows=rows, groups=groups, eps=eps, SIZE=size, BM=tile.BM,
        BD=tile.BD, PARTS=parts > 1, BEFORE=before, AFTER=z is not None and not before, num_warps=tile.num_warps,
    )  # fmt: skip
    return (y,) if total is None else (y, total)


def _backward(
    h, z, weight, dy, dtotal, eps, size, before, dtype, branch_dtype
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return dx in `dtype`, dbranch in `branch_dtype`, dz and dweight; `h` is x, or x + branch.

    dbranch is None if `branch_dtype` is None, and a view of dx if both dtypes are equal.
    """
    groups, parts, before = h.shape[-1] // size, len(weight) // size, before and z is not None
    dx = torch.empty(h.shape, dtype=dtype, device=h.device)
    dz = None if z is None else torch.empty(h.shape, dtype=z.dtype, device=h.device)
    dbranch = None
    if branch_dtype is not None and branch_dtype != dtype:
        dbranch = torch.empty(h.shape, dtype=branch_dtype, device=h.device)
    rows, tile = h.numel() // size // parts, tuning.row_tile(size)
    programs = tuning.row_programs(cdiv(rows, tile.BM) * parts) // parts or 1
    dweights = torch.empty((programs, len(weight)), dtype=torch.float32, device=h.device)
    (h, stride_h), (z, stride_z), (dy, stride_dy), (dtotal, stride_dtotal) = map(_rows, (h, z, dy, dtotal))
    rms_norm_backward_kernel[(programs, parts)](
        h=h, z=z, weight=contiguous(weight), dy=dy, dtotal=dtotal, dx=dx, dbranch=dbranch, dz=dz, dweights=dweights,
        stride_h=stride_h, stride_z=stride_z, stride_dy=stride_dy, stride_dtotal=stride_dtotal, rows=rows,
        groups=groups, eps=eps, SIZE=size, BM=tile.BM, BD=tile.BD, PARTS=parts > 1, BEFORE=before,
        AFTER=z is not None and not before, num_warps=tile.num_warps,
    )  # fmt: skip
    if branch_dtype is not None and dbranch is None:
        dbranch = dx.view(dx.shape)
    return dx, dbranch, dz, dweights.sum(0).to(weight.dtype)


_replayed = Replayed(_backward)


def _save(ctx, inputs, output) -> None:
    x, branch, z, weight, *ctx.options, _ = inputs
    ctx.save_for_backward(x if branch is None else output[1], z, weight)
    ctx.dtypes = x.dtype, None if branch is None else branch.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, dtotal=None):
    h, z, weight = ctx.saved_tensors
    dtype, branch_dtype = ctx.dtypes
    if dy is None:
        assert dtotal is not None, "at least one result was used"
        grads = dtotal.to(dtype), None if branch_dtype is None else dtotal.to(branch_dtype), None, None
    else:
        grads = _replayed(h, z, weight, dy, dtotal, *ctx.options, dtype, branch_dtype)
    return *grads, None, None, None, None


rms_norm_triton = eager_function("rms_norm", _run, _save, _gradients, RowCall())
gated_rms_norm_triton = eager_function("gated_rms_norm", _run, _save, _gradients, RowCall())
