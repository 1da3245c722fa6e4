"""Kernels of the convolution: forward over whole sequences, and one decoding step that updates the state.

A program of the forward is one warp: it scans BT tokens of BD channels with the last W inputs in registers, so it loads
each input once.
"""

# ruff would ask for starred tuples, which Triton does not support
# ruff: noqa: RUF005

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.kernels.triton.activations import sigmoid
from tokenmix_core.kernels.triton.varlen import locate_chunk, locate_slot
from tokenmix_core.ops.buffers import contiguous, token_rows
from tokenmix_core.ops.causal_conv1d import tuning
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.slots import Pool, pool_strides, slot_stride


class Channels(NamedTuple):
    """Pointers to an input `[…, D]`, its weight `[D, W]`, bias and state; the stride between tokens; and D."""

    x: tl.tensor
    weight: tl.tensor
    bias: tl.tensor | None
    state: tl.tensor | None
    stride: tl.tensor
    D: tl.tensor


class Slots(NamedTuple):
    """Slots of a prefill: `slots` and `fresh` of `slots.Pool`, and the number of elements from one slot to the next.

    All three are None in a call without slots.
    """

    slots: tl.tensor | None
    fresh: tl.tensor | None
    stride: tl.tensor | None


class Run(NamedTuple):
    """A program's tokens: at most BT from position `first` of sequence `i_n` (rows from `begin`, `length` tokens)."""

    i_n: tl.tensor
    begin: tl.tensor
    length: tl.tensor
    first: tl.tensor
    BT: tl.tensor


@triton.jit
def within(o_t, low, high, m_d):
    """Return the channel mask `m_d` if `low` ≤ `o_t` < `high`, else a mask that is False everywhere."""
    # Triton 3.9's interpreter does not support a scalar as mask
    b_t = o_t + tl.zeros(m_d.shape, tl.int32)
    return (b_t >= low) & (b_t < high) & m_d


@triton.jit
def load_input(p_x, p_initial, o_t, length, m_d, stride_x, W: tl.constexpr, m_initial=None):
    """Load the input at position `o_t` as float32, from the initial state if negative; zero outside of both.

    `m_d` masks the channels. `m_initial`, unless None, replaces it for reads from the initial state.
    """
    b_x = tl.load(p_x + o_t.to(tl.int64) * stride_x, mask=within(o_t, 0, length, m_d), other=0.0).to(tl.float32)
    if p_initial is not None:
        m_past = m_d if m_initial is None else m_initial
        b_x += tl.load(p_initial + o_t + (W - 1), mask=within(o_t, 1 - W, 0, m_past), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def convolve(
    channels, run, o, final_state, slots, i_d, W: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, SILU: tl.constexpr
):
    """Convolve BT tokens of BD channels, BU tokens per iteration.

    Without slots the program of the sequence's last tokens writes the final state. With slots, the initial and the
    final state are the sequence's slot of one pool; then the program of the first tokens, which alone reads the initial
    state, writes the final state after its loads.
    """
    x, weight, bias, initial_state, stride_x, D = channels
    i_n, begin, length, first, BT = run
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D
    end = tl.minimum(first + BT, length)
    o_state = (tl.cast(i_n, tl.int64) * D + o_d) * (W - 1)
    p_x = x + begin * stride_x + o_d
    p_o = o + begin * D + o_d
    p_initial = initial_state
    m_initial = None
    stores = first + BT >= length
    # Triton 3.6 cannot compare a tuple that contains None with None
    if slots.slots is not None:
        slot, held = locate_slot(i_n, slots.slots, slots.fresh)
        o_state = slot * slots.stride + o_d * (W - 1)
        m_initial = o_d < tl.where(held, D, 0)
        stores = (first == 0) & (slot >= 0)
    if initial_state is not None:
        p_initial += o_state
    b_bias = tl.zeros([BD], tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_w = ()
    # the first of the last W inputs is a placeholder, which is shifted out before it is used
    b_x = (b_bias,)
    for w in tl.static_range(W):
        b_w = b_w + (tl.load(weight + o_d * W + w, mask=m_d, other=0.0).to(tl.float32),)
    for w in tl.static_range(W - 1):
        b_x = b_x + (load_input(p_x, p_initial, first - (W - 1) + w, length, m_d, stride_x, W, m_initial),)

    for i in range(0, end - first, BU):
        o_t = first + i
        b_xs = ()
        for u in tl.static_range(BU):
            m_t = within(o_t + u, 0, end, m_d)
            b_xs = b_xs + (tl.load(p_x + (o_t + u).to(tl.int64) * stride_x, mask=m_t, other=0.0),)
        for u in tl.static_range(BU):
            b_x = b_x[1:] + (b_xs[u].to(tl.float32),)
            b_o = b_bias
            for w in tl.static_range(W):
                b_o += b_w[w] * b_x[w]
            if SILU:
                b_o *= sigmoid(b_o)
            p_t = p_o + (o_t + u).to(tl.int64) * D
            tl.store(p_t, b_o.to(o.dtype.element_ty), mask=within(o_t + u, 0, end, m_d))
    if stores:
        for w in tl.static_range(W - 1):
            b_last = load_input(p_x, p_initial, length - (W - 1) + w, length, m_d, stride_x, W, m_initial)
            tl.store(final_state + o_state + w, b_last.to(final_state.dtype.element_ty), mask=m_d)


@triton.jit
def of_input(i_x, x0, x1, x2):
    """Return `x0`, `x1` or `x2` for input index `i_x` = 0, 1 or 2; `x0` if the call has one input (`x1` is None).

    The three are pointers of one type, or integers, and not None, which no function can return in Triton 3.6.
    """
    if x1 is None:
        return x0
    else:
        return tl.where(i_x == 0, x0, tl.where(i_x == 1, x1, x2))


@triton.jit
def locate_channels(i_d, D0, D1, BD: tl.constexpr):
    """Return the input to which block `i_d` of BD channels belongs, and the block's index in it; D1: see `of_input`."""
    if D1 is None:
        return 0, i_d
    else:
        n0, n1 = tl.cdiv(D0, BD), tl.cdiv(D1, BD)
        i_x = (i_d >= n0).to(tl.int32) + (i_d >= n0 + n1).to(tl.int32)
        return i_x, i_d - tl.where(i_x > 0, n0, 0) - tl.where(i_x > 1, n1, 0)


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "BT"])
def short_convs_forward_kernel(
    x0, x1, x2, weight0, weight1, weight2, bias, initial0, initial1, initial2, o0, o1, o2, final0, final1, final2,
    cu_seqlens, slots, fresh, stride_state0, stride_state1, stride_state2, stride0, stride1, stride2,
    T, N, BT, D0, D1, D2,
    W: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Convolve BT tokens of BD channels of one to three inputs (`of_three`); only a single input has a bias."""
    i_n, begin, length, first = locate_chunk(tl.program_id(0), T, BT, N, cu_seqlens, PACKED)
    # an empty sequence also has one run, which copies the initial state to the final state
    if first >= tl.maximum(length, 1):
        return
    i_x, i_d = locate_channels(tl.program_id(1), D0, D1, BD)
    initial_state = None if initial0 is None else of_input(i_x, initial0, initial1, initial2)
    channels = Channels(
        of_input(i_x, x0, x1, x2), of_input(i_x, weight0, weight1, weight2), bias, initial_state,
        of_input(i_x, stride0, stride1, stride2), of_input(i_x, D0, D1, D2),
    )  # fmt: skip
    o = of_input(i_x, o0, o1, o2)
    final_state = None if final0 is None else of_input(i_x, final0, final1, final2)
    run = Run(i_n, begin, length, first, BT)
    state_stride = None if stride_state0 is None else of_input(i_x, stride_state0, stride_state1, stride_state2)
    given = Slots(slots, fresh, state_stride)
    convolve(channels, run, o, final_state, given, i_d, W, BD, BU, SILU)


def of_three(**each: Sequence | None) -> dict[str, Any]:
    """Return kernel arguments `name0` to `name2` from sequences of one to three values; None becomes None three times.

    The second and third argument of a single input are None. If there are two inputs, the kernel's third input gets the
    values of the first, but has no channels (`channel_counts`) and is not read.
    """
    given = {name: [None] if values is None else values for name, values in each.items()}
    fill = {name: v[0] if len(v) > 1 else None for name, v in given.items()}
    return {f"{name}{i}": x for name, v in given.items() for i, x in enumerate([*v, fill[name], fill[name]][:3])}


def channel_counts(xs: Sequence[Tensor]) -> list[int]:
    """Return the widths of one to three inputs, for `of_three`; after two inputs a third one of 0."""
    sizes = [x.shape[-1] for x in xs]
    return [*sizes, 0] if len(sizes) == 2 else sizes


def short_convs_forward(
    xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, activation: str | None,
    initial_states: Sequence[Tensor] | None, cu_seqlens: Tensor | None, pools: Sequence[Pool] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return o `[B, T, D]`, and each sequence's last inputs `[N, D, W − 1]`, for each of one to three inputs.

    With `pools`, which have equal slots, these slots have the inputs before each sequence, and the last inputs
    overwrite them.
    """
    xs, weights, bias = [token_rows(x) for x in xs], [w.contiguous() for w in weights], contiguous(bias)
    (B, T, _), W = xs[0].shape, weights[0].shape[1]
    sizes, N = channel_counts(xs), num_sequences(xs[0], cu_seqlens)
    config = tuning.conv1d_forward_tile(B * T, sum(sizes))
    outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    if pools is None:
        initial_states = None if initial_states is None else [x.contiguous() for x in initial_states]
        final_states = [torch.empty((N, x.shape[2], W - 1), dtype=x.dtype, device=x.device) for x in xs]
    else:
        initial_states = final_states = [pool.state for pool in pools]
        # only the first program of a sequence may read the initial state, as `convolve` requires
        config = config._replace(BT=max(config.BT, W - 1))
    blocks = sum(cdiv(D, config.BD) for D in sizes)
    short_convs_forward_kernel[(chunk_slots(B, T, config.BT, cu_seqlens), blocks)](
        **of_three(x=xs, weight=weights, initial=initial_states, o=outputs, final=final_states, D=sizes),
        **of_three(stride=[x.stride(1) for x in xs], stride_state=pool_strides(pools)), bias=bias,
        slots=None if pools is None else pools[0].slots, fresh=None if pools is None else pools[0].fresh,
        cu_seqlens=cu_seqlens, T=T, N=N, BT=config.BT, W=W, BD=config.BD, BU=config.BU, SILU=activation == "silu",
        PACKED=cu_seqlens is not None, num_warps=1,
    )  # fmt: skip
    zero_padding(cu_seqlens, *outputs)
    return outputs, final_states


@triton.jit
def step_channels(channels, o, slots, stride_state, i_b, i_d, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr):
    """Convolve one token of BD channels of sequence `i_b`; append the token to the state, dropping the oldest input.

    With `slots`, the state is the sequence's slot, `stride_state` elements from the next.
    """
    x, weight, bias, state, stride_x, D = channels
    o_d = i_d * BD + tl.arange(0, BD)
    m_o = o_d < D
    m_d = m_o
    if slots is not None:
        # a padded row (negative slot) loads zeros, also for the bias, and stores their output, which is zero
        i_slot = tl.load(slots + i_b).to(tl.int64)
        # the interpreter does not support a mask made of a scalar
        m_d = m_d & (i_slot + tl.zeros([BD], tl.int64) >= 0)
        p_s = state + i_slot * stride_state + o_d * (W - 1)
    else:
        p_s = state + (i_b * D + o_d) * (W - 1)
    b_o = tl.zeros([BD], tl.float32)
    if bias is not None:
        b_o += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    for w in tl.static_range(W - 1):
        b_x = tl.load(p_s + w, mask=m_d, other=0.0)
        b_o += b_x.to(tl.float32) * tl.load(weight + o_d * W + w, mask=m_d, other=0.0).to(tl.float32)
        if w > 0:
            tl.store(p_s + w - 1, b_x, mask=m_d)
    b_x = tl.load(x + i_b * stride_x + o_d, mask=m_d, other=0.0)
    b_o += b_x.to(tl.float32) * tl.load(weight + o_d * W + W - 1, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_s + W - 2, b_x, mask=m_d)
    if SILU:
        b_o *= sigmoid(b_o)
    tl.store(o + i_b * D + o_d, b_o.to(o.dtype.element_ty), mask=m_o)


@cached_launch
@triton.jit
def short_conv_steps_kernel(
    x0, x1, x2, weight0, weight1, weight2, bias, state0, state1, state2, slots, o0, o1, o2,
    stride0, stride1, stride2, stride_state0, stride_state1, stride_state2, D0, D1, D2,
    W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Convolve one token, BD channels of a sequence, of one to three inputs; only a single input has a bias."""
    gdc_launch_and_wait(PDL)
    i_b, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = Channels(x0, weight0, bias, state0, stride0, D0)
    if x1 is None:
        step_channels(channels, o0, slots, stride_state0, i_b, i_d, W, BD, SILU)
    else:
        n0, n1 = tl.cdiv(D0, BD), tl.cdiv(D1, BD)
        if i_d < n0:
            step_channels(channels, o0, slots, stride_state0, i_b, i_d, W, BD, SILU)
        elif i_d < n0 + n1:
            channels = Channels(x1, weight1, None, state1, stride1, D1)
            step_channels(channels, o1, slots, stride_state1, i_b, i_d - n0, W, BD, SILU)
        else:
            channels = Channels(x2, weight2, None, state2, stride2, D2)
            step_channels(channels, o2, slots, stride_state2, i_b, i_d - n0 - n1, W, BD, SILU)


def short_conv_steps(
    xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None, states: Sequence[Tensor],
    activation: str | None, slots: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Return o `[B, D]` of one token for each of one to three inputs; `states`, or their `slots`, are updated."""
    xs = [x if x.stride(1) == 1 else x.contiguous() for x in xs]
    weights, sizes, BD = [w.contiguous() for w in weights], channel_counts(xs), 256
    outputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    short_conv_steps_kernel[(len(xs[0]), sum(cdiv(D, BD) for D in sizes))](
        **of_three(x=xs, weight=weights, state=states, o=outputs, stride=[x.stride(0) for x in xs], D=sizes),
        **of_three(stride_state=[slot_stride(slots, state) for state in states]), bias=contiguous(bias),
        slots=contiguous(slots), W=weights[0].shape[1], BD=BD, SILU=activation == "silu", num_warps=2,
    )  # fmt: skip
    return outputs
