"""Triton kernels of the short convolution's gradients; those of weights and biases are computed as partial sums."""

# ruff would ask for starred tuples, which Triton does not support
# ruff: noqa: RUF005

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.activations import sigmoid
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.buffers import contiguous, token_rows
from tokenmix_core.ops.causal_conv1d import tuning
from tokenmix_core.ops.causal_conv1d.forward import (
    Channels,
    Run,
    channel_counts,
    load_input,
    locate_channels,
    of_input,
    of_three,
    within,
)
from tokenmix_core.ops.padding import zero_padding


class Gradients(NamedTuple):
    """Pointers to gradients: those of o (with its stride between tokens) and of the final state are read.

    Those of x (`dx`) and of the initial state (`initial`) are written.
    """

    do: tl.tensor
    stride: tl.tensor
    final: tl.tensor | None
    dx: tl.tensor
    initial: tl.tensor | None


class PartialSums(NamedTuple):
    """Partial sums `[runs, W + 1, columns]` of the gradients of weight and bias: one sum per run of BT tokens.

    i_c: index of the program's run; columns: number of channels, of all inputs together.
    """

    sums: tl.tensor
    i_c: tl.tensor
    columns: tl.tensor


@triton.jit
def convolve_backward(
    channels, run, gradients, partial, i_d, W: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, SILU: tl.constexpr
):
    """Compute the convolution's gradients for BT tokens of BD channels, BU tokens per iteration.

    Registers hold the last W inputs, and the last W gradients with respect to the activation's input. A channel belongs
    to one thread, so sums over tokens need no communication.
    """
    x, weight, bias, initial_state, stride_x, D = channels
    i_n, begin, length, first, BT = run
    do, stride_do, final_gradient, dx, initial_gradient = gradients
    dsums, i_c, columns = partial
    o_d = i_d * BD + tl.arange(0, BD)
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

    # W − 1 more iterations: the last W − 1 inputs also influence the W − 1 outputs after this program's tokens
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
            # the tokens from `end` on belong to the next program, which adds their terms to its own sums
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
                # inputs at negative positions come from the initial state; only the sequence's first run of tokens
                # stores their gradients
                p_s = initial_gradient + o_state + (o_s + W - 1)
                m_s = within(o_s, tl.where(first == 0, 1 - W, 0), 0, m_d)
                tl.store(p_s, b_dx.to(initial_gradient.dtype.element_ty), mask=m_s)
    # a packed batch may have runs without tokens; they store zeros, because the next kernel adds the sums of all runs
    p_sums = dsums + tl.cast(i_c, tl.int64) * (W + 1) * columns + o_d
    for w in tl.static_range(W + 1):
        tl.store(p_sums + w * columns, b_sums[w], mask=m_d)


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "BT"])
def short_convs_backward_kernel(
    x0, x1, x2, weight0, weight1, weight2, bias, initial0, initial1, initial2, do0, do1, do2, dfinal0, dfinal1, dfinal2,
    dx0, dx1, dx2, dsums, dinitial0, dinitial1, dinitial2, cu_seqlens,
    stride0, stride1, stride2, stride_do0, stride_do1, stride_do2, T, N, BT, D0, D1, D2,
    W: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients for BT tokens of BD channels of one to three inputs; `dsums` has the channels of all."""
    i_c = tl.program_id(0)
    i_n, begin, length, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    i_x, i_d = locate_channels(tl.program_id(1), D0, D1, BD)
    initial_state = None if initial0 is None else of_input(i_x, initial0, initial1, initial2)
    initial_gradient = None if dinitial0 is None else of_input(i_x, dinitial0, dinitial1, dinitial2)
    final_gradient = None if dfinal0 is None else of_input(i_x, dfinal0, dfinal1, dfinal2)
    channels = Channels(
        of_input(i_x, x0, x1, x2), of_input(i_x, weight0, weight1, weight2), bias, initial_state,
        of_input(i_x, stride0, stride1, stride2), of_input(i_x, D0, D1, D2),
    )  # fmt: skip
    gradients = Gradients(
        of_input(i_x, do0, do1, do2), of_input(i_x, stride_do0, stride_do1, stride_do2), final_gradient,
        of_input(i_x, dx0, dx1, dx2), initial_gradient,
    )  # fmt: skip
    if D1 is None:
        partial = PartialSums(dsums, i_c, D0)
    else:
        partial = PartialSums(dsums + of_input(i_x, 0, D0, D0 + D1), i_c, D0 + D1 + D2)
    convolve_backward(channels, Run(i_n, begin, length, first, BT), gradients, partial, i_d, W, BD, BU, SILU)


@cached_launch
@triton.jit(do_not_specialize=["runs"])
def short_conv_sums_kernel(dsums, dweight, dbias, runs, D, W: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Sum one row of `dsums [runs, W + 1, columns]` (a tap of the weight, or the bias) over runs, BR runs at a time."""
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


def short_convs_backward(
    xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, activation: str | None,
    initial_states: Sequence[Tensor] | None, cu_seqlens: Tensor | None, dos: Sequence[Tensor],
    final_gradients: Sequence[Tensor] | None,
) -> tuple[list[Tensor], Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Return the gradients of one to three inputs, their weights, the bias and the initial states.

    The weights have one gradient `[sum of D, W]`; without a bias its gradient is None, and without initial states the
    list of their gradients is empty.
    """
    xs, dos = ([token_rows(x) for x in tensors] for tensors in (xs, dos))
    weights, bias = [w.contiguous() for w in weights], contiguous(bias)
    initial_states, final_gradients = (
        None if tensors is None else [x.contiguous() for x in tensors] for tensors in (initial_states, final_gradients)
    )
    (B, T, _), W = xs[0].shape, weights[0].shape[1]
    sizes, device = channel_counts(xs), xs[0].device
    config = tuning.conv1d_backward_tile(B * T, sum(sizes))
    runs = chunk_slots(B, T, config.BT, cu_seqlens)
    dxs = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in xs]
    # sum over the tokens of each run, then over runs, in a fixed order, so that results are reproducible
    dsums = torch.empty((runs, W + 1, sum(sizes)), dtype=torch.float32, device=device)
    initial_gradients = [torch.empty_like(x) for x in initial_states or ()]
    short_convs_backward_kernel[(runs, sum(cdiv(D, config.BD) for D in sizes))](
        **of_three(x=xs, weight=weights, initial=initial_states, do=dos, dfinal=final_gradients, dx=dxs, D=sizes),
        **of_three(dinitial=initial_gradients or None),
        **of_three(stride=[x.stride(1) for x in xs], stride_do=[x.stride(1) for x in dos]), bias=bias,
        dsums=dsums, cu_seqlens=cu_seqlens, T=T, N=num_sequences(xs[0], cu_seqlens), BT=config.BT, W=W, BD=config.BD,
        BU=config.BU, SILU=activation == "silu", PACKED=cu_seqlens is not None, num_warps=1,
    )  # fmt: skip
    dweights = torch.empty((sum(sizes), W), dtype=weights[0].dtype, device=device)
    dbias = None if bias is None else torch.empty_like(bias)
    sum_runs(dsums, dweights, dbias)
    zero_padding(cu_seqlens, *dxs)
    return dxs, dweights, dbias, initial_gradients


def sum_runs(dsums, dweight, dbias) -> None:
    """Sum `dsums [runs, W + 1, D]` over runs of BT tokens into dweight and, if there is one, dbias."""
    (runs, _, D), W = dsums.shape, dweight.shape[1]
    BR, BD = 128, 32
    short_conv_sums_kernel[(cdiv(D, BD), W + 1)](
        dsums=dsums, dweight=dweight, dbias=dbias, runs=runs, D=D, W=W, BR=BR, BD=BD, num_warps=4
    )
