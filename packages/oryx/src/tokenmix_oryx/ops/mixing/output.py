"""A kernel that selects each token's output by its mode and applies gate and norm, and its backward kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import cached_launch, sm_count
from tokenmix_oryx.ops.mixing.queries import rows_before_padding, silu_gradient

# number of tokens per program in the forward
TOKENS = 1
# attention's backward multiplies all rows of a tile that holds a token in attention mode, so the gradients of the
# tile's other rows must be finite; a tile has at most REACH + 1 queries
REACH = 127


@triton.jit
def column(b_x, BG: tl.constexpr):
    """Broadcast a scalar to a column `[BG, 1]`: Triton 3.9's interpreter does not accept scalars as masks."""
    return tl.zeros([BG, 1], tl.int32) + b_x


@triton.jit
def load_output(o_attention, o_linear, o_x, m_a, m_x):
    """Load a token's output in float32: attention's if m_a (attention mode) is True, else the linear mixer's."""
    b_o = tl.load(o_attention + o_x, mask=m_x & m_a, other=0.0).to(tl.float32)
    return b_o + tl.load(o_linear + o_x, mask=m_x & (m_a == 0), other=0.0).to(tl.float32)


@cached_launch
@triton.jit
def _output_forward(
    o_attention, o_linear, gate, weight, attends, y, last, stride_gate, N, G, S, eps,
    BG: tl.constexpr, BS: tl.constexpr, TOKENS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    o_g, o_s = tl.arange(0, BG)[:, None], tl.arange(0, BS)[None, :]
    o_d = o_g * S + o_s
    m_d = (o_g < G) & (o_s < S)
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    for i in tl.static_range(TOKENS):
        i_t = tl.program_id(0).to(tl.int64) * TOKENS + i
        m_x = m_d & (column(i_t, BG) < N)
        m_a = column(tl.load(attends + i_t, mask=i_t < N, other=0).to(tl.int32), BG) != 0
        m_i = m_x
        if last is not None:
            m_i &= column(i_t, BG) < rows_before_padding(last, N)
        b_u = load_output(o_attention, o_linear, i_t * (G * S) + o_d, m_a, m_i)
        b_gate = tl.load(gate + i_t * stride_gate + o_d, mask=m_i, other=0.0).to(tl.float32)
        b_gate *= tl.sigmoid(b_gate)
        if BEFORE:
            b_u *= b_gate
        b_y = b_u * tl.rsqrt(tl.sum(b_u * b_u, 1) / S + eps)[:, None] * b_w
        if not BEFORE:
            b_y *= b_gate
        tl.store(y + i_t * (G * S) + o_d, b_y.to(y.dtype.element_ty), mask=m_x)


@cached_launch
@triton.jit
def _output_backward(
    o_attention, o_linear, gate, weight, attends, dy, do_attention, do_linear, dgate, dweights, last,
    stride_gate, stride_dy, stride_dgate, N, tokens, G, S, eps,
    BG: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, REACH: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    o_g, o_s = tl.arange(0, BG)[:, None], tl.arange(0, BS)[None, :]
    o_d = o_g * S + o_s
    m_d = (o_g < G) & (o_s < S)
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BG, BS], tl.float32)
    first = tl.program_id(0) * tokens
    # whether attention's backward may read this program's rows: within REACH rows of them a token is in attention mode
    o_near = first - REACH + tl.arange(0, BN)
    m_near = (o_near >= 0) & (o_near < tl.minimum(first + tokens + REACH, N))
    near = column(tl.max((tl.load(attends + o_near, mask=m_near, other=0) != 0).to(tl.int32), 0), BG) != 0
    for i in range(first, tl.minimum(first + tokens, N)):
        i_t = tl.cast(i, tl.int64)
        o_x = i_t * (G * S) + o_d
        m_a = column(tl.load(attends + i_t).to(tl.int32), BG) != 0
        m_i = m_d
        if last is not None:
            m_i &= column(i_t, BG) < rows_before_padding(last, N)
        b_dy = tl.load(dy + i_t * stride_dy + o_d, mask=m_i, other=0.0).to(tl.float32)
        b_z = tl.load(gate + i_t * stride_gate + o_d, mask=m_i, other=0.0).to(tl.float32)
        b_o = load_output(o_attention, o_linear, o_x, m_a, m_i)
        b_gate = b_z * tl.sigmoid(b_z)
        # û: u normalised; c w: gradient of û, with w the norm's weight; the gate is a factor of c or, if it acts before
        # the norm, of u
        b_c = b_dy
        b_u = b_o
        if BEFORE:
            b_u *= b_gate
        else:
            b_c *= b_gate
        b_norm = tl.rsqrt(tl.sum(b_u * b_u, 1) / S + eps)[:, None]
        b_mean = (tl.sum(b_c * b_w * b_u, 1) / S)[:, None] * b_norm * b_norm
        b_du = b_norm * (b_c * b_w - b_u * b_mean)
        b_dw += b_c * b_u * b_norm
        if BEFORE:
            b_dgate = b_du * b_o
            b_du *= b_gate
        else:
            b_dgate = b_dy * b_w * b_u * b_norm
        tl.store(dgate + i_t * stride_dgate + o_d, (b_dgate * silu_gradient(b_z)).to(dgate.dtype.element_ty), mask=m_d)
        tl.store(do_linear + o_x, tl.where(m_a, 0.0, b_du).to(do_linear.dtype.element_ty), mask=m_d)
        b_do = tl.where(m_a, b_du, 0.0).to(do_attention.dtype.element_ty)
        tl.store(do_attention + o_x, b_do, mask=m_d & near)
    tl.store(dweights + tl.program_id(0).to(tl.int64) * (G * S) + o_d, b_dw, mask=m_d)


def output_forward(
    *, o_attention, o_linear, gate, weight, attends, last, groups: int, eps: float, before: bool
) -> Tensor:
    """Return y `[N, E]` from each token's row of `o_attention` or `o_linear`, selected by the token's mode.

    `gate [N, E]`, to which SiLU is still to be applied, acts before the norm over E / groups channels if `before`, else
    after it.
    """
    N, E = gate.shape
    y = gate.new_empty(N, E)
    _output_forward[(cdiv(N, TOKENS),)](
        o_attention=o_attention, o_linear=o_linear, gate=gate, weight=weight, attends=attends, y=y,
        last=last,
        stride_gate=gate.stride(0), N=N, G=groups, S=E // groups, eps=eps, **_tile(E, groups), TOKENS=TOKENS,
        BEFORE=before, num_warps=8,
    )  # fmt: skip
    return y


def output_backward(
    *, o_attention, o_linear, gate, weight, attends, dy, dgate, last, groups: int, eps: float, before: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `o_attention` (defined only near tokens in attention mode), `o_linear` and `weight`.

    The gradient of the gate is written to `dgate`. If `before`, the gate multiplies the norm's input, else its output.
    """
    N, E = gate.shape
    do_attention, do_linear = (dy.new_empty(N, E) for _ in range(2))
    tokens = max(8, cdiv(N, 16 * sm_count(gate.device)))
    programs = cdiv(N, tokens)
    dweights = gate.new_empty(programs, E, dtype=torch.float32)
    _output_backward[(programs,)](
        o_attention=o_attention, o_linear=o_linear, gate=gate, weight=weight, attends=attends, dy=dy,
        do_attention=do_attention, do_linear=do_linear, dgate=dgate, dweights=dweights, last=last,
        stride_gate=gate.stride(0),
        stride_dy=dy.stride(0), stride_dgate=dgate.stride(0), N=N, tokens=tokens, G=groups, S=E // groups, eps=eps,
        **_tile(E, groups), BN=next_power_of_2(tokens + 2 * REACH), REACH=REACH, BEFORE=before, num_warps=8,
    )  # fmt: skip
    return do_attention, do_linear, dweights.sum(0).to(weight.dtype)


def _tile(E: int, groups: int) -> dict[str, int]:
    return {"BG": next_power_of_2(groups), "BS": next_power_of_2(E // groups)}
