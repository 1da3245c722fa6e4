"""A kernel that gathers both modes' queries in token order, activates and rotates them, and its backward kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import cached_launch

# number of tokens and of heads per program
BT, HEADS = 16, 2


@triton.jit
def silu_gradient(b_x):
    """Return the derivative of SiLU at x."""
    b_sigmoid = tl.sigmoid(b_x)
    return b_sigmoid * (1.0 + b_x * (1.0 - b_sigmoid))


@triton.jit
def by_mode(m_a, b_attention, b_linear, ATTENTION: tl.constexpr, LINEAR: tl.constexpr):
    """Return `b_attention` for tokens whose mode has its flag set, `b_linear` for all other tokens.

    `m_a` is True for tokens in attention mode, whose flag is ATTENTION; LINEAR is the flag of tokens in linear mode.
    """
    if ATTENTION and LINEAR:
        return b_attention
    elif ATTENTION:
        return tl.where(m_a, b_attention, b_linear)
    elif LINEAR:
        return tl.where(m_a, b_linear, b_attention)
    else:
        return b_linear


@triton.jit
def locate_tokens(row_ids, attends, cos, sin, N, groups, angles, HALF: tl.constexpr, BT: tl.constexpr):
    """Return a program's tokens, the rows of their queries, the mask of attention mode, and cosines and sines."""
    o_t = tl.program_id(0) // groups * BT + tl.arange(0, BT)
    m_t = o_t < N
    o_row = o_t.to(tl.int64)
    if row_ids is not None:
        o_row = tl.load(row_ids + o_t, mask=m_t, other=0).to(tl.int64)
    m_a = (tl.load(attends + o_t, mask=m_t, other=0) != 0)[:, None]
    o_angle = (o_t % angles)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    b_cos = tl.load(cos + o_angle, mask=m_t[:, None], other=1.0)
    return o_t, o_row[:, None], m_a, b_cos, tl.load(sin + o_angle, mask=m_t[:, None], other=0.0)


@triton.jit
def locate_head(i, o_t, N, H, groups, K: tl.constexpr, HEADS: tl.constexpr):
    """Return the offsets of the first K / 2 channels of a program's i-th head, and a mask of tokens and heads."""
    i_h = tl.program_id(0) % groups * HEADS + i
    o_d = i_h * K + tl.arange(0, K // 2)[None, :]
    return o_d, (o_t < N)[:, None] & (o_d < H * K)


@triton.jit
def rows_before_padding(last, N):
    """Return the number of rows before padding: the last boundary if `last` is a pointer to it, N if it is None."""
    if last is None:
        return N
    else:
        return tl.minimum(N, tl.load(last).to(tl.int32))


@cached_launch
@triton.jit
def _queries_forward(
    rows, row_ids, attends, cos, sin, q, N, H, angles,
    K: tl.constexpr, BT: tl.constexpr, HEADS: tl.constexpr,
    SILU_ATTENTION: tl.constexpr, SILU_LINEAR: tl.constexpr, ROTATE_LINEAR: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = K // 2
    groups = tl.cdiv(H, HEADS)
    o_t, o_row, m_a, b_cos, b_sin = locate_tokens(row_ids, attends, cos, sin, N, groups, angles, HALF, BT)
    for i in tl.static_range(HEADS):
        o_d, m_x = locate_head(i, o_t, N, H, groups, K, HEADS)
        p_x = rows + o_row * (H * K) + o_d
        b_lo = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
        b_hi = tl.load(p_x + HALF, mask=m_x, other=0.0).to(tl.float32)
        if SILU_ATTENTION or SILU_LINEAR:
            b_lo = by_mode(m_a, b_lo * tl.sigmoid(b_lo), b_lo, SILU_ATTENTION, SILU_LINEAR)
            b_hi = by_mode(m_a, b_hi * tl.sigmoid(b_hi), b_hi, SILU_ATTENTION, SILU_LINEAR)
        b_first = by_mode(m_a, b_lo * b_cos - b_hi * b_sin, b_lo, True, ROTATE_LINEAR)
        b_second = by_mode(m_a, b_hi * b_cos + b_lo * b_sin, b_hi, True, ROTATE_LINEAR)
        p_q = q + o_t.to(tl.int64)[:, None] * (H * K) + o_d
        tl.store(p_q, b_first.to(q.dtype.element_ty), mask=m_x)
        tl.store(p_q + HALF, b_second.to(q.dtype.element_ty), mask=m_x)


@cached_launch
@triton.jit
def _queries_backward(
    rows, row_ids, attends, cos, sin, dq_attention, dq_linear, drows, last, N, H, angles,
    K: tl.constexpr, BT: tl.constexpr, HEADS: tl.constexpr,
    SILU_ATTENTION: tl.constexpr, SILU_LINEAR: tl.constexpr, ROTATE_LINEAR: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = K // 2
    groups = tl.cdiv(H, HEADS)
    o_t, o_row, m_a, b_cos, b_sin = locate_tokens(row_ids, attends, cos, sin, N, groups, angles, HALF, BT)
    for i in tl.static_range(HEADS):
        o_d, m_x = locate_head(i, o_t, N, H, groups, K, HEADS)
        # each row gets only the gradient of its token's mode; rows of padding get 0
        m_d = m_x
        if last is not None:
            m_d &= (o_t < rows_before_padding(last, N))[:, None]
        o_q = o_t.to(tl.int64)[:, None] * (H * K) + o_d
        b_first = tl.load(dq_attention + o_q, mask=m_d & m_a, other=0.0).to(tl.float32)
        b_first += tl.load(dq_linear + o_q, mask=m_d & (m_a == 0), other=0.0).to(tl.float32)
        b_second = tl.load(dq_attention + o_q + HALF, mask=m_d & m_a, other=0.0).to(tl.float32)
        b_second += tl.load(dq_linear + o_q + HALF, mask=m_d & (m_a == 0), other=0.0).to(tl.float32)
        b_lo = by_mode(m_a, b_first * b_cos + b_second * b_sin, b_first, True, ROTATE_LINEAR)
        b_hi = by_mode(m_a, b_second * b_cos - b_first * b_sin, b_second, True, ROTATE_LINEAR)
        o_x = o_row * (H * K) + o_d
        if SILU_ATTENTION or SILU_LINEAR:
            b_x = tl.load(rows + o_x, mask=m_d, other=0.0).to(tl.float32)
            b_lo = by_mode(m_a, b_lo * silu_gradient(b_x), b_lo, SILU_ATTENTION, SILU_LINEAR)
            b_x = tl.load(rows + o_x + HALF, mask=m_d, other=0.0).to(tl.float32)
            b_hi = by_mode(m_a, b_hi * silu_gradient(b_x), b_hi, SILU_ATTENTION, SILU_LINEAR)
        tl.store(drows + o_x, b_lo.to(drows.dtype.element_ty), mask=m_x)
        tl.store(drows + o_x + HALF, b_hi.to(drows.dtype.element_ty), mask=m_x)


def queries_forward(
    *, rows: Tensor, row_ids: Tensor | None, attends: Tensor, cos: Tensor, sin: Tensor, H: int, **modes: bool
) -> Tensor:
    """Return q `[N, H K]` from `rows [N, H K]`; token t has the row `row_ids[t]`, or row t if `row_ids` is None.

    `modes` says whether to apply SiLU in attention mode (`silu_attention`) and in linear mode (`silu_linear`), and
    whether to rotate in linear mode (`rotate_linear`).
    """
    N, E = rows.shape
    q = torch.empty_like(rows)
    _queries_forward[(cdiv(N, BT) * cdiv(H, HEADS),)](
        rows=rows, row_ids=row_ids, attends=attends, cos=cos, sin=sin, q=q, N=N, H=H, angles=cos.shape[0],
        K=E // H, BT=BT, HEADS=HEADS, **_flags(**modes), num_warps=4,
    )  # fmt: skip
    return q


def queries_backward(
    *, rows, row_ids, attends, cos, sin, dq_attention, dq_linear, last, H: int, **modes: bool
) -> Tensor:  # fmt: skip
    """Return the gradient of `rows`; of the two gradients of q, each row uses the one of its token's mode.

    `last` points to the last boundary of a packed batch; for other batches it is None.
    """
    N, E = rows.shape
    drows = torch.empty_like(rows)
    _queries_backward[(cdiv(N, BT) * cdiv(H, HEADS),)](
        rows=rows, row_ids=row_ids, attends=attends, cos=cos, sin=sin, dq_attention=dq_attention, dq_linear=dq_linear,
        drows=drows, last=last, N=N, H=H, angles=cos.shape[0], K=E // H, BT=BT, HEADS=HEADS, **_flags(**modes),
        num_warps=4,
    )  # fmt: skip
    return drows


def _flags(*, silu_attention: bool, silu_linear: bool, rotate_linear: bool) -> dict[str, bool]:
    return {"SILU_ATTENTION": silu_attention, "SILU_LINEAR": silu_linear, "ROTATE_LINEAR": rotate_linear}
