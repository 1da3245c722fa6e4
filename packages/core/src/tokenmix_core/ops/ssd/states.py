"""States at the boundaries of chunks and segments: forward in time, and their gradients backward in time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import load_decay
from tokenmix_core.kernels.triton.memory import last_of
from tokenmix_core.kernels.triton.varlen import first_chunk, locate_chunk, sequence_span
from tokenmix_core.ops.ssd.tuning import SSDStates
from tokenmix_core.ops.ssd.types import Inputs


@triton.jit
def scan_states(
    x, y, g, dt, initial, boundaries, final, totals,
    begin, length, i_slot, i_s, i_h, i_g, i_k, i_v,
    stride_x, stride_y, scale, HV,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Carry one tile of the state over `length` tokens from row `begin` on.

    Forward: S ← e^total S + Σ_j e^(total − b_j) x_j (Δ_j y_j)ᵀ, x = k and y = v.
    Reverse: D ← e^total D + scale Σ_i e^(b_i) x_i y_iᵀ, x = q and y = do, the gradient of the state before the chunk.
    """
    x += i_g * K + i_k * BK
    y += i_h * V + i_v * BV
    g += i_h
    if dt is not None:
        dt += i_h
    o_i = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    o_tile = (i_k * BK + o_k[:, None]) * V + i_v * BV + o_v[None, :]
    o_span = (i_s.to(tl.int64) * HV + i_h) * K * V
    b_s = tl.zeros([BK, BV], tl.float32)
    if initial is not None:
        b_s += tl.load(initial + o_span + o_tile)
    b_decay = 0.0
    chunks = tl.cdiv(length, BT)
    for i in range(chunks):
        i_t = chunks - 1 - i if REVERSE else i
        if boundaries is not None:
            o_boundary = ((i_slot + i_t) * HV + i_h) * K * V
            tl.store(boundaries + o_boundary + o_tile, b_s.to(boundaries.dtype.element_ty))
        o_t = begin + i_t * BT
        m_t = i_t * BT + o_i < length
        b_g = load_decay(g + o_t * HV + o_i * HV, m_t)
        b_b = tl.cumsum(b_g, 0)
        # the sum of another order would not cancel at the last token
        b_total = last_of(b_b, length - i_t * BT, BT)
        b_x = tl.load(x + o_t * stride_x + o_i[:, None] * stride_x + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_y = tl.load(y + o_t * stride_y + o_i[:, None] * stride_y + o_v[None, :], mask=m_t[:, None], other=0.0)
        if REVERSE:
            b_w = tl.exp2(b_b) * scale
        else:
            b_w = tl.exp2(b_total - b_b)
        if dt is not None:
            b_w *= tl.load(dt + o_t * HV + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
        b_w = (b_y * b_w[:, None]).to(b_y.dtype)
        b_s = tl.dot(tl.trans(b_x), b_w, b_s * tl.exp2(b_total), input_precision="tf32x3")
        b_decay += b_total
    if final is not None:
        tl.store(final + o_span + o_tile, b_s)
    if totals is not None:
        tl.store(totals + i_s.to(tl.int64) * HV + i_h, b_decay)


@triton.jit
def locate_tile(
    i_p, T, N, HV, segment, cu_seqlens,
    NK: tl.constexpr, NV: tl.constexpr, BT: tl.constexpr, SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """First row, length and first boundary slot of a program's tokens, its span, its head and its tile of the state."""
    i_v = i_p % NV
    i_k = i_p // NV % NK
    i_h = i_p // (NV * NK) % HV
    i_s = i_p // (NV * NK) // HV
    if SEGMENTED:
        i_n, begin, length, first = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED)
        i_slot = first_chunk(i_n, begin, T, BT, PACKED) + first // BT
        begin += first
        length = tl.minimum(length - first, segment)
    else:
        begin, length = sequence_span(i_s, T, cu_seqlens, PACKED)
        i_slot = first_chunk(i_s, begin, T, BT, PACKED)
    return begin, length, i_slot, i_s, i_h, i_k, i_v


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def segment_states_kernel(
    x, y, g, dt, states, totals, cu_seqlens, stride_x, stride_y, scale, T, N, G, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Make the state that a segment leaves of zeros, a tile of it a program, and the decay over the segment."""
    begin, length, i_slot, i_s, i_h, i_k, i_v = locate_tile(
        tl.program_id(0), T, N, HV, segment, cu_seqlens, K // BK, V // BV, BT, True, PACKED
    )
    if length > 0:
        scan_states(
            x, y, g, dt, None, None, states, totals,
            begin, length, i_slot, i_s, i_h, i_h // (HV // G), i_k, i_v, stride_x, stride_y, scale, HV,
            K, V, BT, BK, BV, REVERSE,
        )  # fmt: skip


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def boundary_states_kernel(
    q, k, v, do, g, dt, entering, dleaving, states, dstates, dinitial_state, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """States before chunks and gradients of those after, a sequence or segment and a tile a program."""
    begin, length, i_slot, i_s, i_h, i_k, i_v = locate_tile(
        tl.program_id(0), T, N, HV, segment, cu_seqlens, K // BK, V // BV, BT, SEGMENTED, PACKED
    )
    if SEGMENTED and length <= 0:
        return
    i_g = i_h // (HV // G)
    # the two directions know nothing of each other: one launch fills the device with both
    if tl.program_id(1) == 0:
        scan_states(
            k, v, g, dt, entering, states, None, None,
            begin, length, i_slot, i_s, i_h, i_g, i_k, i_v, stride_k, stride_v, scale, HV,
            K, V, BT, BK, BV, False,
        )  # fmt: skip
    else:
        scan_states(
            q, do, g, None, dleaving, dstates, dinitial_state, None,
            begin, length, i_slot, i_s, i_h, i_g, i_k, i_v, stride_q, stride_do, scale, HV,
            K, V, BT, BK, BV, True,
        )  # fmt: skip


@cached_launch
@triton.jit(do_not_specialize=["T", "HV", "segment"])
def scan_segments_kernel(
    segment_states, totals, initial, final, cu_seqlens, T, HV, segment,
    KV: tl.constexpr, BE: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The state before each segment, in place of what the segment makes of zeros, and the last one of each sequence."""
    i_p = tl.program_id(0)
    i_e = i_p % (KV // BE)
    i_h = i_p // (KV // BE) % HV
    i_n = i_p // (KV // BE) // HV
    begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    i_slot = first_chunk(i_n, begin, T, segment, PACKED)
    o_e = i_e * BE + tl.arange(0, BE)
    o_sequence = (i_n.to(tl.int64) * HV + i_h) * KV
    b_s = tl.zeros([BE], tl.float32)
    if initial is not None:
        b_s += tl.load(initial + o_sequence + o_e)
    segments = tl.cdiv(length, segment)
    for i in tl.range(segments, num_stages=3):
        i_row = (i_slot + (segments - 1 - i if REVERSE else i)) * HV + i_h
        p_s = segment_states + i_row * KV + o_e
        b_own = tl.load(p_s)
        tl.store(p_s, b_s)
        b_s = b_s * tl.exp2(tl.load(totals + i_row)) + b_own
    tl.store(final + o_sequence + o_e, b_s)


def segment_states(
    x: Inputs, *, segment: int, config: SSDStates, do: Tensor | None = None, dfinal_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the states that enter segments, and the final ones: `[slots, HV, K, V]` and `[N, HV, K, V]`, float32.

    With `do` return the gradients of the states that leave segments, and of the initial states.
    """
    reverse = do is not None
    rows, columns = (x.k, x.v) if do is None else (x.q, do)
    initial, dt = (dfinal_state, None) if reverse else (x.initial_state, x.dt)
    B, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    N, spans = num_sequences(x.q, x.cu_seqlens), chunk_slots(B, T, segment, x.cu_seqlens)
    states = torch.empty(spans, HV, K, V, dtype=torch.float32, device=x.v.device)
    totals = torch.empty(spans, HV, dtype=torch.float32, device=x.v.device)
    final = torch.empty(N, HV, K, V, dtype=torch.float32, device=x.v.device)
    BK, BV = config.BK, config.BV
    segment_states_kernel[(spans * HV * (K // BK) * (V // BV),)](
        x=rows, y=columns, g=x.g, dt=dt, states=states, totals=totals, cu_seqlens=x.cu_seqlens,
        stride_x=rows.stride(1), stride_y=columns.stride(1), scale=x.scale, T=T, N=N, G=G, HV=HV, segment=segment, K=K,
        V=V, BT=config.BT, BK=BK, BV=BV, REVERSE=reverse, PACKED=x.cu_seqlens is not None, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    BE = min(K * V, 1024)
    scan_segments_kernel[(N * HV * (K * V // BE),)](
        segment_states=states, totals=totals, initial=initial, final=final, cu_seqlens=x.cu_seqlens, T=T, HV=HV,
        segment=segment, KV=K * V, BE=BE, REVERSE=reverse, PACKED=x.cu_seqlens is not None, num_warps=4,
    )  # fmt: skip
    return states, final


def boundary_states(
    x: Inputs,
    *,
    do: Tensor,
    entering: Tensor | None,
    dleaving: Tensor | None,
    segment: int,
    config: SSDStates,
    with_gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return states before and gradients of states after each chunk, `[slots, HV, K, V]`, and the initial gradient.

    Args:
        entering, dleaving: states that enter, and gradients of the states that leave, each sequence (float32, None for
            zero), or each segment if `segment` is positive.
        with_gradients: False computes the states alone.

    Returns:
        states and gradients in the inputs' dtype, and the gradient of the initial states, float32; None for segments.
    """
    B, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.q, x.cu_seqlens)
    chunks = chunk_slots(B, T, config.BT, x.cu_seqlens)
    states = torch.empty(1 + with_gradients, chunks, HV, K, V, dtype=x.v.dtype, device=x.v.device)
    dinitial_state = None
    if with_gradients and not segment:
        dinitial_state = torch.empty(N, HV, K, V, dtype=torch.float32, device=x.v.device)
    spans = N if entering is None or not segment else len(entering)
    BK, BV = config.BK, config.BV
    boundary_states_kernel[(spans * HV * (K // BK) * (V // BV), len(states))](
        q=x.q, k=x.k, v=x.v, do=do, g=x.g, dt=x.dt, entering=entering, dleaving=dleaving, states=states[0],
        dstates=states[-1], dinitial_state=dinitial_state, cu_seqlens=x.cu_seqlens, stride_q=x.q.stride(1),
        stride_k=x.k.stride(1), stride_v=x.v.stride(1), stride_do=do.stride(1), scale=x.scale, T=T, N=N, G=G, HV=HV,
        segment=segment, K=K, V=V, BT=config.BT, BK=BK, BV=BV, SEGMENTED=segment > 0, PACKED=x.cu_seqlens is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return states[0], states[-1], dinitial_state
