"""States at the boundaries of chunks and segments (forward scan), and their gradients (reverse scan)."""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import load_decay
from tokenmix_core.kernels.triton.memory import last_of
from tokenmix_core.kernels.triton.precision import FLOAT32_DOT
from tokenmix_core.kernels.triton.varlen import first_chunk, locate_chunk, locate_slot, sequence_span
from tokenmix_core.ops.slots import Pool, slot_arguments
from tokenmix_core.ops.ssd.tuning import SSDStates
from tokenmix_core.ops.ssd.types import Inputs

# K, V, tokens per chunk, rows and columns of a program's tile of the state; constexprs, for branches at compile time
Sizes = namedtuple("Sizes", "K V BT BK BV")
# a program's first row, number of tokens, and index of its first chunk in the batch; indices of its sequence or
# segment, its head, and its tile along K and V
Tile = namedtuple("Tile", "bos length i_slot i_s i_h i_k i_v")
# tensors that a scan reads (see `scan_states`), the strides of x and y between tokens, and the scale
Rows = namedtuple("Rows", "x y g dt stride_x stride_y scale")
# the initial state that a scan reads; tensors for the results: states at chunk boundaries, final states, total decays;
# each may be None
States = namedtuple("States", "initial boundaries final totals")


@triton.jit
def scan_states(rows, states, tile, i_g, HV, sizes, REVERSE: tl.constexpr):
    """Scan a tile of the state over a program's tokens, chunk by chunk; b: cumulative decay, total: the chunk's last b.

    Forward: S ← e^total S + Σ_j e^(total − b_j) x_j (Δ_j y_j)ᵀ, where x is k and y is v.
    Reverse: D ← e^total D + scale Σ_i e^(b_i) x_i y_iᵀ, where x is q and y is do. The new D is the gradient of the
        state before the chunk.
    """
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    BT: tl.constexpr = sizes.BT
    BK: tl.constexpr = sizes.BK
    BV: tl.constexpr = sizes.BV
    x = rows.x + (i_g * K + tile.i_k * BK)
    y = rows.y + (tile.i_h * V + tile.i_v * BV)
    g = rows.g + tile.i_h
    if rows.dt is not None:
        dt = rows.dt + tile.i_h
    o_i = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    o_tile = (tile.i_k * BK + o_k[:, None]) * V + tile.i_v * BV + o_v[None, :]
    o_span = (tile.i_s.to(tl.int64) * HV + tile.i_h) * K * V
    b_s = tl.zeros([BK, BV], tl.float32)
    if states.initial is not None:
        b_s += tl.load(states.initial + o_span + o_tile)
    b_decay = 0.0
    NT = tl.cdiv(tile.length, BT)
    for i in range(NT):
        i_t = NT - 1 - i if REVERSE else i
        if states.boundaries is not None:
            o_boundary = ((tile.i_slot + i_t) * HV + tile.i_h) * K * V
            tl.store(states.boundaries + o_boundary + o_tile, b_s.to(states.boundaries.dtype.element_ty))
        o_t = tile.bos + i_t * BT
        m_t = i_t * BT + o_i < tile.length
        b_g = load_decay(g + o_t * HV + o_i * HV, m_t)
        b_b = tl.cumsum(b_g, 0)
        # take b_total from the cumulative sum: a separate sum would round differently, and b_total − b would not be
        # exactly 0 at the last token
        b_total = last_of(b_b, tile.length - i_t * BT, BT)
        p_x = x + o_t * rows.stride_x + o_i[:, None] * rows.stride_x + o_k[None, :]
        b_x = tl.load(p_x, mask=m_t[:, None], other=0.0)
        p_y = y + o_t * rows.stride_y + o_i[:, None] * rows.stride_y + o_v[None, :]
        b_y = tl.load(p_y, mask=m_t[:, None], other=0.0)
        if REVERSE:
            b_w = tl.exp2(b_b) * rows.scale
        else:
            b_w = tl.exp2(b_total - b_b)
        if rows.dt is not None:
            b_w *= tl.load(dt + o_t * HV + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
        b_w = (b_y * b_w[:, None]).to(b_y.dtype)
        b_s = tl.dot(tl.trans(b_x), b_w, b_s * tl.exp2(b_total), input_precision=FLOAT32_DOT)
        b_decay += b_total
    if states.final is not None:
        tl.store(states.final + o_span + o_tile, b_s)
    if states.totals is not None:
        tl.store(states.totals + tile.i_s.to(tl.int64) * HV + tile.i_h, b_decay)


@triton.jit
def locate_tile(T, N, HV, segment, cu_seqlens, sizes, SEGMENTED: tl.constexpr, PACKED: tl.constexpr):
    """Return the `Tile` of this program, in a segment if SEGMENTED, else in a whole sequence."""
    NK: tl.constexpr = sizes.K // sizes.BK
    NV: tl.constexpr = sizes.V // sizes.BV
    i_p = tl.program_id(0)
    i_v = i_p % NV
    i_k = i_p // NV % NK
    i_h = i_p // (NV * NK) % HV
    i_s = i_p // (NV * NK) // HV
    if SEGMENTED:
        i_n, bos, length, first = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED)
        i_slot = first_chunk(i_n, bos, T, sizes.BT, PACKED) + first // sizes.BT
        bos += first
        length = tl.minimum(length - first, segment)
    else:
        bos, length = sequence_span(i_s, T, cu_seqlens, PACKED)
        i_slot = first_chunk(i_s, bos, T, sizes.BT, PACKED)
    return Tile(bos, length, i_slot, i_s, i_h, i_k, i_v)


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def segment_states_kernel(
    x, y, g, dt, states, totals, cu_seqlens, stride_x, stride_y, scale, T, N, G, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the state that leaves a segment if zero enters it, and the decay over the segment.

    With REVERSE, compute instead the gradient of the entering state if that of the leaving state is zero.
    """
    tile = locate_tile(T, N, HV, segment, cu_seqlens, Sizes(K, V, BT, BK, BV), True, PACKED)
    if tile.length > 0:
        rows, results = Rows(x, y, g, dt, stride_x, stride_y, scale), States(None, None, states, totals)
        scan_states(rows, results, tile, tile.i_h // (HV // G), HV, Sizes(K, V, BT, BK, BV), REVERSE)


@cached_launch
@triton.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def boundary_states_kernel(
    q, k, v, do, g, dt, entering, dleaving, states, dstates, dinitial_state, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SEGMENTED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the states before chunks, or of the gradients of states after chunks, per program."""
    tile = locate_tile(T, N, HV, segment, cu_seqlens, Sizes(K, V, BT, BK, BV), SEGMENTED, PACKED)
    if SEGMENTED and tile.length <= 0:
        return
    i_g = tile.i_h // (HV // G)
    # the forward and the reverse scan are independent: one launch with both fills the device
    if tl.program_id(1) == 0:
        rows = Rows(k, v, g, dt, stride_k, stride_v, scale)
        results = States(entering, states, None, None)
        scan_states(rows, results, tile, i_g, HV, Sizes(K, V, BT, BK, BV), False)
    else:
        rows_do = Rows(q, do, g, None, stride_q, stride_do, scale)
        gradients = States(dleaving, dstates, dinitial_state, None)
        scan_states(rows_do, gradients, tile, i_g, HV, Sizes(K, V, BT, BK, BV), True)


@cached_launch
@triton.jit(do_not_specialize=["T", "HV", "segment"])
def scan_segments_kernel(
    segment_states, totals, initial, final, cu_seqlens, slots, fresh, stride_state, T, HV, segment,
    KV: tl.constexpr, BE: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Replace each segment's own final state, which starts from zero, by the state entering it; store final states.

    With REVERSE, gradients replace states, and segments are scanned from the last to the first. With `slots`, `initial`
    and `final` are one pool, and only the final states of sequences without tokens are stored: the forward kernel
    stores the others.
    """
    i_p = tl.program_id(0)
    i_e = i_p % (KV // BE)
    i_h = i_p // (KV // BE) % HV
    i_n = i_p // (KV // BE) // HV
    bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    i_slot = first_chunk(i_n, bos, T, segment, PACKED)
    o_e = i_e * BE + tl.arange(0, BE)
    o_sequence = (i_n.to(tl.int64) * HV + i_h) * KV
    b_s = tl.zeros([BE], tl.float32)
    if slots is not None:
        slot, held = locate_slot(i_n, slots, fresh)
        o_pool = slot * stride_state + i_h * KV + o_e
        b_s += tl.load(initial + o_pool, mask=o_e < tl.where(held, KV, 0), other=0.0)
    elif initial is not None:
        b_s += tl.load(initial + o_sequence + o_e)
    segments = tl.cdiv(length, segment)
    for i in tl.range(segments, num_stages=3):
        i_row = (i_slot + (segments - 1 - i if REVERSE else i)) * HV + i_h
        p_s = segment_states + i_row * KV + o_e
        b_own = tl.load(p_s)
        tl.store(p_s, b_s)
        b_s = b_s * tl.exp2(tl.load(totals + i_row)) + b_own
    if slots is not None:
        tl.store(final + o_pool, b_s, mask=o_e < tl.where((segments == 0) & (slot >= 0), KV, 0))
    else:
        tl.store(final + o_sequence + o_e, b_s)


def segment_states(
    x: Inputs,
    *,
    segment: int,
    config: SSDStates,
    do: Tensor | None = None,
    dfinal_state: Tensor | None = None,
    pool: Pool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return states that enter segments `[slots, HV, K, V]`, final states `[N, HV, K, V]`, decays `[slots, HV]`.

    All are float32; a decay is the base-2 logarithm of that over a segment.

    `slots`: one entry per segment of `segment` tokens (`chunking.chunk_slots`). With `do`, return instead the gradients
    of the states that leave segments, and of the initial states. With `pool`, initial states are in its slots, and the
    second result is the pool, of which only slots of sequences without tokens are overwritten.
    """
    reverse = do is not None
    rows, columns = (x.k, x.v) if do is None else (x.q, do)
    initial, dt = (dfinal_state, None) if reverse else (x.initial_state, x.dt)
    B, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    N, spans = num_sequences(x.q, x.cu_seqlens), chunk_slots(B, T, segment, x.cu_seqlens)
    states = torch.empty(spans, HV, K, V, dtype=torch.float32, device=x.v.device)
    totals = torch.empty(spans, HV, dtype=torch.float32, device=x.v.device)
    if pool is None:
        final = torch.empty(N, HV, K, V, dtype=torch.float32, device=x.v.device)
    else:
        initial = final = pool.state
    BK, BV = config.BK, config.BV
    segment_states_kernel[(spans * HV * (K // BK) * (V // BV),)](
        x=rows, y=columns, g=x.g, dt=dt, states=states, totals=totals, cu_seqlens=x.cu_seqlens,
        stride_x=rows.stride(1), stride_y=columns.stride(1), scale=x.scale, T=T, N=N, G=G, HV=HV, segment=segment, K=K,
        V=V, BT=config.BT, BK=BK, BV=BV, REVERSE=reverse, PACKED=x.cu_seqlens is not None, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    BE = min(K * V, 1024)
    scan_segments_kernel[(N * HV * (K * V // BE),)](
        segment_states=states, totals=totals, initial=initial, final=final, **slot_arguments(pool),
        cu_seqlens=x.cu_seqlens, T=T, HV=HV, segment=segment, KV=K * V, BE=BE, REVERSE=reverse,
        PACKED=x.cu_seqlens is not None, num_warps=4,
    )  # fmt: skip
    return states, final, totals


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
    """Return states before chunks, gradients of states after chunks, and the gradient of the initial states.

    Args:
        entering, dleaving: float32 states that enter, and gradients of the states that leave, each sequence (None for
            zero) or, if `segment` is positive, each segment.
        with_gradients: False to compute the states only.

    Returns:
        states and gradients `[slots, HV, K, V]`, one entry per chunk, in the inputs' dtype; the initial states'
        gradient in float32, None if there are segments.
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
