"""Gradients of the convolution: of its inputs and both states, and partial sums of those of weight and bias."""

# Triton knows no stars in tuples
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv, chunk_slots, num_sequences
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.convolution.forward import load_input, sigmoid, within
from tokenmix_core.tile.sequences import locate_chunk
from tokenmix_core.tuning import ShortConvRun


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "BT"])
def short_conv_backward_kernel(
    x, weight, bias, initial_state, do, final_gradient, dx, dsums, initial_gradient, cu_seqlens,
    stride_x, stride_do, T, N, BT, D,
    W: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One walk over BT tokens, BU a step; the last W inputs and gradients of sums before the activation are registers.

    A thread owns its channels: what is summed over tokens meets no other thread.
    """
    i_c = tl.program_id(0)
    i_n, begin, length, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    end = tl.minimum(first + BT, length)
    o_state = (tl.cast(i_n, tl.int64) * D + o_d) * (W - 1)
    p_x = x + begin * stride_x + o_d
    p_do = do + begin * stride_do + o_d
    p_dx = dx + begin * D + o_d
    p_initial = initial_state
    if initial_state is not None:
        p_initial += o_state
    zero = tl.zeros([BD], tl.float32)
    b_bias = tl.zeros([BD], tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_w = ()
    b_x = ()
    b_dz = ()
    b_sums = (zero,)
    for w in tl.static_range(W):
        b_w = b_w + (tl.load(weight + o_d * W + w, mask=m_d, other=0.0).to(tl.float32),)
        b_sums = b_sums + (zero,)
        b_dz = b_dz + (zero,)
        b_x = b_x + (load_input(p_x, p_initial, first - W + w, length, m_d, stride_x, W),)

    # the last W − 1 gradients of inputs need those of sums after them
    for i in range(0, tl.maximum(end - first, 0) + W - 1, BU):
        o_t = first + i
        b_xs = ()
        b_dos = ()
        for u in tl.static_range(BU):
            m_t = within(o_t + u, 0, length, m_d)
            b_xs = b_xs + (tl.load(p_x + (o_t + u).to(tl.int64) * stride_x, mask=m_t, other=0.0),)
            b_dos = b_dos + (tl.load(p_do + (o_t + u).to(tl.int64) * stride_do, mask=m_t, other=0.0),)
        for u in tl.static_range(BU):
            b_x = b_x[1:] + (b_xs[u].to(tl.float32),)
            b_new = b_dos[u].to(tl.float32)
            if SILU:
                b_z = b_bias
                for w in tl.static_range(W):
                    b_z += b_w[w] * b_x[w]
                b_sigmoid = sigmoid(b_z)
                b_new *= b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
            b_dz = b_dz[1:] + (b_new,)
            # later tokens are the next run's
            b_own = tl.where(o_t + u < end, b_new, 0.0)
            b_added = ()
            for w in tl.static_range(W):
                b_added = b_added + (b_sums[w] + b_own * b_x[w],)
            b_sums = b_added + (b_sums[W] + b_own,)
            b_dx = zero
            for w in tl.static_range(W):
                b_dx += b_w[W - 1 - w] * b_dz[w]
            o_s = o_t + u - (W - 1)
            if final_gradient is not None:
                m_s = within(o_s, length - (W - 1), length, m_d)
                b_dx += tl.load(final_gradient + o_state + (o_s - length + W - 1), mask=m_s, other=0.0).to(tl.float32)
            p_s = p_dx + o_s.to(tl.int64) * D
            tl.store(p_s, b_dx.to(dx.dtype.element_ty), mask=within(o_s, first, end, m_d))
            if initial_gradient is not None:
                # the first run alone has positions before 0
                p_s = initial_gradient + o_state + (o_s + W - 1)
                m_s = within(o_s, tl.where(first == 0, 1 - W, 0), 0, m_d)
                tl.store(p_s, b_dx.to(initial_gradient.dtype.element_ty), mask=m_s)
    # unused slots of a packed batch write zeros for the sum over slots
    p_sums = dsums + tl.cast(i_c, tl.int64) * (W + 1) * D + o_d
    for w in tl.static_range(W + 1):
        tl.store(p_sums + w * D, b_sums[w], mask=m_d)


@cached_launch
@triton.jit(do_not_specialize=["runs"])
def short_conv_sums_kernel(dsums, dweight, dbias, runs, D, W: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Sums over runs, BR at a time: for one tap, or for the bias."""
    o_d, i_w = tl.program_id(0) * BD + tl.arange(0, BD), tl.program_id(1)
    m_d = o_d < D
    b_sum = tl.zeros([BR, BD], tl.float32)
    for start in range(0, runs, BR):
        o_r = start + tl.arange(0, BR)
        p_sums = dsums + (o_r.to(tl.int64) * (W + 1) + i_w)[:, None] * D + o_d[None, :]
        b_sum += tl.load(p_sums, mask=(o_r < runs)[:, None] & m_d[None, :], other=0.0)
    b_sum = tl.sum(b_sum, 0)
    if i_w < W:
        tl.store(dweight + o_d * W + i_w, b_sum.to(dweight.dtype.element_ty), mask=m_d)
    elif dbias is not None:
        tl.store(dbias + o_d, b_sum.to(dbias.dtype.element_ty), mask=m_d)


def short_conv_backward(
    x, weight, bias, activation, initial_state, cu_seqlens, do, final_gradient, config: ShortConvRun
):
    """Gradients of x, weight, bias and the initial state; the latter two None where their tensors are."""
    B, T, D = x.shape
    W = weight.shape[1]
    N = num_sequences(x, cu_seqlens)
    runs = chunk_slots(B, T, config.BT, cu_seqlens)
    dx = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    # sums over the tokens of a run, then over runs: a fixed order, so the result never changes
    dsums = torch.empty((runs, W + 1, D), dtype=torch.float32, device=x.device)
    initial_gradient = None if initial_state is None else torch.empty_like(initial_state)
    short_conv_backward_kernel[(runs, cdiv(D, config.BD))](
        x, weight, bias, initial_state, do, final_gradient, dx, dsums, initial_gradient, cu_seqlens,
        x.stride(1), do.stride(1), T, N, config.BT, D,
        W, config.BD, config.BU, activation == "silu", cu_seqlens is not None, num_warps=1,
    )  # fmt: skip
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    BR, BD = 128, 32
    short_conv_sums_kernel[(cdiv(D, BD), W + 1)](dsums, dweight, dbias, runs, D, W, BR, BD, num_warps=4)
    return dx, dweight, dbias, initial_gradient
