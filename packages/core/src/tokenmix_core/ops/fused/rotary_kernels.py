"""Triton kernels of the rotary embedding and its gradients, for eager mode.

A program takes a block of heads, or a single head in a decoding step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.kernels.launch.cache.row_calls import RowCall
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import as_rows, contiguous, rows_of


@triton.jit
def load_halves(p_x, m_r, HALF: tl.constexpr, BH: tl.constexpr):
    """Load the first and the second half of the channels of the heads at `p_x [BM]`, each as float32 `[BM, BH]`."""
    o_d = tl.arange(0, BH)
    mask = m_r[:, None] & (o_d < HALF)[None, :]
    p_x = p_x[:, None] + o_d[None, :]
    b_a = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    return b_a, tl.load(p_x + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_halves(p_x, b_a, b_b, m_r, HALF: tl.constexpr, BH: tl.constexpr):
    """Store the first half `b_a` and the second half `b_b` of the channels of the heads at `p_x [BM]`."""
    o_d = tl.arange(0, BH)
    mask = m_r[:, None] & (o_d < HALF)[None, :]
    p_x = p_x[:, None] + o_d[None, :]
    tl.store(p_x, b_a.to(p_x.dtype.element_ty), mask=mask)
    tl.store(p_x + HALF, b_b.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def load_angles(cos, sin, o_t, m_r, HALF: tl.constexpr, BH: tl.constexpr):
    """Load the cosines and sines, each `[BM, BH]`, of the tokens `o_t [BM]`; `m_r [BM]` is their mask."""
    o_d = tl.arange(0, BH)
    mask = m_r[:, None] & (o_d < HALF)[None, :]
    columns = (o_t * HALF)[:, None] + o_d[None, :]
    return tl.load(cos + columns, mask=mask, other=0.0), tl.load(sin + columns, mask=mask, other=0.0)


@triton.jit
def load_rotated(p_x, weight, cos, sin, o_t, m_r, eps, HALF: tl.constexpr, BH: tl.constexpr):
    """Load the halves of the heads at `p_x [BM]`, normalised unless `weight` is None, rotated unless `cos` is None."""
    b_a, b_b = load_halves(p_x, m_r, HALF, BH)
    if weight is not None:
        o_d = tl.arange(0, BH)
        b_r = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, 1) / (2 * HALF) + eps)[:, None]
        b_a *= b_r * tl.load(weight + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
        b_b *= b_r * tl.load(weight + HALF + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
    if cos is not None:
        b_cos, b_sin = load_angles(cos, sin, o_t, m_r, HALF, BH)
        b_a, b_b = b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin
    return b_a, b_b


@cached_launch
@triton.jit(do_not_specialize=["rows", "rotated"])
def rotate_kernel(
    x, weight, cos, sin, y, stride_x, rows, rotated, H, eps, HALF: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Rotate a block of heads, normalised before unless `weight` is None.

    Token t reads row t mod `rotated` of cos and sin, so sequences can share the angles.
    """
    gdc_launch_and_wait(PDL)
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_r = o_r < rows
    o_t = o_r // H
    p_x = x + o_t * stride_x + (o_r % H) * 2 * HALF
    b_a, b_b = load_rotated(p_x, weight, cos, sin, o_t % rotated, m_r, eps, HALF, BH)
    store_halves(y + o_r * 2 * HALF, b_a, b_b, m_r, HALF, BH)


@cached_launch
@triton.jit(do_not_specialize=["rotated"])
def rotate_step_kernel(
    q, k, v, q_weight, k_weight, cos, sin, y, keys, values, positions, stride_q, stride_k, stride_v, s_kb, s_kp, s_kh,
    s_vb, s_vp, s_vh, rotated, HQ, H, eps, HALF: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Rotate one head of q into y, or rotate one of k or copy one of v into the token's cache slot.

    q and k are normalised before the rotation if their weights are given.
    """
    gdc_launch_and_wait(PDL)
    heads = HQ + H if v is None else HQ + 2 * H
    i_h = tl.program_id(0) % heads
    i_n = (tl.program_id(0) // heads).to(tl.int64)
    # the device functions take blocks of heads, so wrap this program's one head in a block of size 1
    o_n = i_n + tl.arange(0, 1)
    m_n = o_n >= 0
    i_s = tl.zeros([], tl.int64)
    if positions is not None:
        i_s = tl.load(positions + i_n).to(tl.int64)
    if i_h < HQ:
        p_x = q + o_n * stride_q + i_h * 2 * HALF
        b_a, b_b = load_rotated(p_x, q_weight, cos, sin, o_n % rotated, m_n, eps, HALF, BH)
        store_halves(y + (o_n * HQ + i_h) * 2 * HALF, b_a, b_b, m_n, HALF, BH)
    elif i_h < HQ + H:
        i_k = i_h - HQ
        p_x = k + o_n * stride_k + i_k * 2 * HALF
        b_a, b_b = load_rotated(p_x, k_weight, cos, sin, o_n % rotated, m_n, eps, HALF, BH)
        store_halves(keys + o_n * s_kb + i_s * s_kp + i_k * s_kh, b_a, b_b, m_n, HALF, BH)
    elif v is not None:
        i_v = i_h - HQ - H
        o_d = tl.arange(0, BV)
        b_v = tl.load(v + i_n * stride_v + i_v * V + o_d, mask=o_d < V)
        tl.store(values + i_n * s_vb + i_s * s_vp + i_v * s_vh + o_d, b_v, mask=o_d < V)


@cached_launch
@triton.jit(do_not_specialize=["rows", "rotated"])
def rotate_backward_kernel(
    x, weight, cos, sin, dy, dx, dweights, stride_x, stride_dy, rows, rotated, H, eps,
    HALF: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Compute the gradients for every num_programs-th block of heads.

    Unless `weight` is None, also store this program's sum of the weight's gradients.
    """
    i_p = tl.program_id(0)
    o_d = tl.arange(0, BH)
    if weight is not None:
        b_w_a = tl.load(weight + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
        b_w_b = tl.load(weight + HALF + o_d, mask=o_d < HALF, other=0.0).to(tl.float32)[None, :]
        b_dw_a = tl.zeros([BM, BH], tl.float32)
        b_dw_b = tl.zeros([BM, BH], tl.float32)
    for i_block in range(i_p, tl.cdiv(rows, BM), tl.num_programs(0)):
        o_r = (i_block * BM + tl.arange(0, BM)).to(tl.int64)
        m_r = o_r < rows
        o_t = o_r // H
        b_p, b_q = load_halves(dy + o_t * stride_dy + (o_r % H) * 2 * HALF, m_r, HALF, BH)
        b_cos, b_sin = load_angles(cos, sin, o_t % rotated, m_r, HALF, BH)
        b_da = b_p * b_cos + b_q * b_sin
        b_db = b_q * b_cos - b_p * b_sin
        if weight is not None:
            b_a, b_b = load_halves(x + o_t * stride_x + (o_r % H) * 2 * HALF, m_r, HALF, BH)
            b_r = tl.rsqrt(tl.sum(b_a * b_a + b_b * b_b, 1) / (2 * HALF) + eps)[:, None]
            b_a *= b_r
            b_b *= b_r
            b_dw_a += b_da * b_a
            b_dw_b += b_db * b_b
            b_da *= b_w_a
            b_db *= b_w_b
            b_mean = (tl.sum(b_da * b_a + b_db * b_b, 1) / (2 * HALF))[:, None]
            b_da = b_r * (b_da - b_a * b_mean)
            b_db = b_r * (b_db - b_b * b_mean)
        store_halves(dx + o_r * 2 * HALF, b_da, b_db, m_r, HALF, BH)
    if weight is not None:
        p_dw = dweights + i_p * 2 * HALF + o_d
        tl.store(p_dw, tl.sum(b_dw_a, 0), mask=o_d < HALF)
        tl.store(p_dw + HALF, tl.sum(b_dw_b, 0), mask=o_d < HALF)


def _run(x, weight, cos, sin, eps) -> Tensor:
    """Return x `[B, T, H, K]` rotated."""
    (B, T, H, K), tokens = x.shape, rows_of(x, 2)
    y, tile = torch.empty(x.shape, dtype=x.dtype, device=x.device), tuning.row_tile(K // 2)
    rotate_kernel[(cdiv(B * T * H, tile.BM),)](
        x=tokens.x, weight=contiguous(weight), cos=contiguous(cos), sin=contiguous(sin), y=y, stride_x=tokens.stride,
        rows=B * T * H, rotated=cos.numel() // (K // 2), H=H, eps=eps, HALF=K // 2, BM=tile.BM, BH=tile.BD,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return y


def _save(ctx, inputs, output) -> None:
    x, weight, cos, sin, ctx.eps = inputs
    ctx.save_for_backward(None if weight is None else x, weight, cos, sin)


def _backward(dy, x, weight, cos, sin, eps) -> tuple[Tensor, Tensor | None]:
    """Return dx and, unless `weight` is None, dweight; x may be None if `weight` is None."""
    (B, T, H, K), rows = dy.shape, rows_of(dy, 2)
    tokens, tile = None if x is None else rows_of(x, 2), tuning.row_tile(K // 2)
    programs = tuning.row_programs(cdiv(B * T * H, tile.BM))
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    dweights = None
    if weight is not None:
        dweights = torch.empty((programs, K), dtype=torch.float32, device=dy.device)
    rotate_backward_kernel[(programs,)](
        x=None if tokens is None else tokens.x, weight=contiguous(weight), cos=contiguous(cos), sin=contiguous(sin),
        dy=rows.x, dx=dx, dweights=dweights, stride_x=0 if tokens is None else tokens.stride, stride_dy=rows.stride,
        rows=B * T * H, rotated=cos.numel() // (K // 2), H=H, eps=eps, HALF=K // 2, BM=tile.BM, BH=tile.BD,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return dx, None if dweights is None or weight is None else dweights.sum(0).to(weight.dtype)


def _run_step(q, k, v, q_weight, k_weight, cos, sin, keys, values, positions, eps) -> Tensor:
    """Return the rotated q `[B, HQ, K]`; store the rotated k, and v, at `positions [B]` of the cache `[B, S, H, ...]`.

    q and k are first normalised if they have a weight. Without cos and sin nothing is rotated, and without `positions`
    the position is 0.
    """
    (B, HQ, K), H, V = q.shape, k.shape[1], 1 if v is None else v.shape[2]
    q, k = (as_rows(x.flatten(1)).view(x.shape) for x in (q, k))
    v = None if v is None else as_rows(v.flatten(1)).view(v.shape)
    y = torch.empty((B, HQ, K), dtype=q.dtype, device=q.device)
    s_kb, s_kp, s_kh, _ = keys.stride()
    s_vb, s_vp, s_vh, _ = (0, 0, 0, 0) if values is None else values.stride()
    rotate_step_kernel[(B * (HQ + (1 if v is None else 2) * H),)](
        q=q, k=k, v=v, q_weight=contiguous(q_weight), k_weight=contiguous(k_weight), cos=contiguous(cos),
        sin=contiguous(sin), y=y, keys=keys, values=values, positions=contiguous(positions), stride_q=q.stride(0),
        stride_k=k.stride(0), stride_v=0 if v is None else v.stride(0), s_kb=s_kb, s_kp=s_kp, s_kh=s_kh, s_vb=s_vb,
        s_vp=s_vp, s_vh=s_vh, rotated=1 if cos is None else cos.numel() // (K // 2), HQ=HQ, H=H, eps=eps, HALF=K // 2,
        V=V, BH=next_power_of_2(K // 2), BV=next_power_of_2(V), num_warps=1,
    )  # fmt: skip
    return y


rotate_step_triton = Replayed(_run_step)
_replayed = Replayed(_backward)


def _gradients(ctx, dy):
    return *_replayed(dy, *ctx.saved_tensors, ctx.eps), None, None, None


rotate_triton = eager_function("rotate", _run, _save, _gradients, RowCall(others={"rotated": 2}))
