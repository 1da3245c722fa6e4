"""Backward of the merge, which recomputes the forward; programs store partial sums of the norm weights' gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import cached_launch, sm_count
from tokenmix_nats_l.ops.merge.forward import inverse_rms, shares, tile

# number of elements of each tensor in a tile: 2,048 would take 254 registers per thread, which halves the occupancy
_ELEMENTS = 1024
# number of programs per SM
_PROGRAMS = 8


@triton.jit
def through_norm(b_dx, b_x, b_r, V):
    """Return the gradient of a norm's input from the gradient of its result x; r is the inverse RMS of the input."""
    return b_r * (b_dx - b_x * (tl.sum(b_dx * b_x, 1) / V)[:, None])


@cached_launch
@triton.jit(do_not_specialize=["R", "tiles"])
def merge_backward_kernel(
    linear, softmax, gate, linear_norm, softmax_norm, logits, dy, dlinear, dsoftmax, dgate, dlogits, dnorms,
    R, tiles, H, V, eps, BR: tl.constexpr, BV: tl.constexpr, EACH: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of all tensors for `tiles` tiles of BR rows; flags as in `merge_forward_kernel`."""
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    b_gamma = tl.load(linear_norm + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    b_other = b_gamma
    if EACH:
        b_other = tl.load(softmax_norm + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    b_dgamma = tl.zeros([BR, BV], tl.float32)
    b_dother = tl.zeros([BR, BV], tl.float32)
    for i in range(tiles):
        o_r = (tl.program_id(0).to(tl.int64) * tiles + i) * BR + tl.arange(0, BR)
        m_r = o_r < R
        m_x, o_x = m_r[:, None] & m_v[None, :], o_r[:, None] * V + o_v[None, :]
        b_l = tl.load(linear + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_s = tl.load(softmax + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_z = tl.load(gate + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_w, b_u = shares(logits, o_r, m_r, H, WEIGHED)
        b_sigmoid = tl.sigmoid(b_z)
        b_dm = b_dy * b_z * b_sigmoid
        if EACH:
            b_rl, b_rs = inverse_rms(b_l, V, eps), inverse_rms(b_s, V, eps)
            b_l, b_s = b_l * b_rl, b_s * b_rs
            b_m = b_w * b_l * b_gamma + b_u * b_s * b_other
            b_dgamma += b_w * b_dm * b_l
            b_dother += b_u * b_dm * b_s
            b_da = tl.sum(b_dm * (b_l * b_gamma - b_s * b_other), 1)
            b_dl = through_norm(b_w * b_dm * b_gamma, b_l, b_rl, V)
            b_ds = through_norm(b_u * b_dm * b_other, b_s, b_rs, V)
        else:
            b_c = b_w * b_l + b_u * b_s
            b_r = inverse_rms(b_c, V, eps)
            b_c *= b_r
            b_m = b_c * b_gamma
            b_dgamma += b_dm * b_c
            b_dc = through_norm(b_dm * b_gamma, b_c, b_r, V)
            b_da = tl.sum(b_dc * (b_l - b_s), 1)
            b_dl, b_ds = b_w * b_dc, b_u * b_dc
        b_dz = b_dy * b_m * b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
        tl.store(dlinear + o_x, b_dl.to(dlinear.dtype.element_ty), mask=m_x)
        tl.store(dsoftmax + o_x, b_ds.to(dsoftmax.dtype.element_ty), mask=m_x)
        tl.store(dgate + o_x, b_dz.to(dgate.dtype.element_ty), mask=m_x)
        if WEIGHED:
            b_da = b_da[:, None] * b_w * b_u
            p_a = (dlogits + (o_r // H) * (2 * H) + o_r % H)[:, None]
            tl.store(p_a, b_da.to(dlogits.dtype.element_ty), mask=m_r[:, None])
            tl.store(p_a + H, (0.0 - b_da).to(dlogits.dtype.element_ty), mask=m_r[:, None])
    p_norms = dnorms + tl.program_id(0).to(tl.int64) * V * (2 if EACH else 1) + o_v
    tl.store(p_norms, tl.sum(b_dgamma, 0), mask=m_v)
    if EACH:
        tl.store(p_norms + V, tl.sum(b_dother, 0), mask=m_v)


def merge_backward(
    linear, softmax, gate, linear_norm, softmax_norm, logits, dy, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of all tensors, which must be contiguous; None for a tensor that is None."""
    B, T, H, V = linear.shape
    each, rows = softmax_norm is not None, B * T * H
    dlinear, dsoftmax, dgate = (torch.empty_like(x) for x in (linear, softmax, gate))
    dlogits = None if logits is None else torch.empty_like(logits)
    BR, BV = tile(V, _ELEMENTS)
    tiles = cdiv(cdiv(rows, BR), _PROGRAMS * sm_count(linear.device))
    programs = cdiv(rows, tiles * BR)
    dnorms = linear.new_empty(programs, 1 + each, V, dtype=torch.float32)
    merge_backward_kernel[(programs,)](
        linear=linear, softmax=softmax, gate=gate, linear_norm=linear_norm, softmax_norm=softmax_norm, logits=logits,
        dy=dy, dlinear=dlinear, dsoftmax=dsoftmax, dgate=dgate, dlogits=dlogits, dnorms=dnorms, R=rows, tiles=tiles,
        H=H, V=V, eps=eps, BR=BR, BV=BV, EACH=each, WEIGHED=logits is not None, num_warps=4,
    )  # fmt: skip
    dlinear_norm, *dsoftmax_norm = (dnorms[:, i].sum(0).to(linear_norm.dtype) for i in range(1 + each))
    return dlinear, dsoftmax, dgate, dlinear_norm, dsoftmax_norm[0] if each else None, dlogits
