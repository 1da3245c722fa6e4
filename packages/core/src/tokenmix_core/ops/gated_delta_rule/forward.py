"""States and outputs: a scan over chunks, parallel over sequences or their segments, value heads and tiles of V.

README.md defines the letters. The state is transposed, `[BV, K]`. Every matrix that is computed between two states is
then the left operand of the next MMA. Hopper's Tensor Cores read left operands from registers, so none of these
matrices passes through shared memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import causal_decay_transposed
from tokenmix_core.kernels.triton.memory import column, inverse_norm, last_of, load_rows, store_rows
from tokenmix_core.kernels.triton.varlen import first_chunk, locate_chunk, locate_slot, sequence_span
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, SIZES, dot_precision, state_layouts
from tokenmix_core.ops.gated_delta_rule.plan import Form
from tokenmix_core.ops.gated_delta_rule.tile_order import longest_first
from tokenmix_core.ops.gated_delta_rule.types import Inputs, Saved, Terms, state_arguments
from tokenmix_core.ops.slots import Pool

# base-2 logarithm below which a decay is negligible
NEGLIGIBLE = tl.constexpr(-32.0)


@triton.jit
def negligible_chunks(p_gates, segment, BT: tl.constexpr, L2NORM: tl.constexpr, LIMIT: tl.constexpr):
    """Return how many chunks at a segment's start have a negligible effect on the state that leaves it.

    Chunks are negligible if the decay over the segment's chunks after them is below 2^LIMIT. With keys of norm 1
    (L2NORM) and β ≤ 2 no update lengthens a column of the state, so decays bound the column's norm; with other keys the
    result is 0. `p_gates` points at the gates of the segment's first token.
    """
    BC: tl.constexpr = 128
    NT = segment // BT
    if not L2NORM:
        return 0
    # only the segment's last BC chunks are examined
    o_c = tl.maximum(NT - BC, 0) + tl.arange(0, BC)
    b_b = tl.load(p_gates + (o_c * BT + BT - 1) * 4, mask=o_c < NT, other=0.0)
    b_left = tl.cumsum(b_b, 0, reverse=True)
    return tl.max(tl.where((b_left < LIMIT) & (o_c < NT), o_c, 0), 0)


@triton.jit
def first_write(i_n, bos, T, BT: tl.constexpr, WRITES: tl.constexpr, PACKED: tl.constexpr):
    """Return, as int64, the index in `writes` of sequence `i_n`'s first factor; WRITES chunks share a factor."""
    return first_chunk(i_n, bos, T, BT * WRITES, PACKED).to(tl.int64)


@triton.jit
def bounded(skipped, p_w, stride, first, segment, BT: tl.constexpr, WRITES: tl.constexpr):
    """Return `skipped` if all write factors of the segment that starts at token `first` are in [0, 1]; else 0.

    `skipped` is the result of `negligible_chunks`, and `p_w` points at the sequence's first factor. A factor serves
    WRITES chunks. Factors in [0, 1] interpolate between the decayed and the updated state, so decays still bound the
    norms of the state's columns.
    """
    BC: tl.constexpr = 128
    tokens: tl.constexpr = BT * WRITES
    beyond = 0
    for i in range(first // tokens, (first + segment) // tokens, BC):
        o_c = i + tl.arange(0, BC)
        b_w = tl.load(p_w + o_c.to(tl.int64) * stride, mask=o_c < (first + segment) // tokens, other=0.0).to(tl.float32)
        beyond += tl.sum(((b_w < 0.0) | (b_w > 1.0)).to(tl.int32), 0)
    return tl.where(beyond > 0, 0, skipped)


@triton.jit
def chunk_gates(p_gates, rows, BT: tl.constexpr):
    """Return b, β r and r of a chunk's tokens, and the last b, which also fills b past the sequence's end.

    b: log2 of the decays since the chunk's start; r: the keys' inverse norms.
    """
    b_gates = load_rows(p_gates, 4, rows, BT, 4)
    b_b = column(b_gates, 0)
    b_last = last_of(b_b, rows, BT)
    return tl.where(tl.arange(0, BT) < rows, b_b, b_last), column(b_gates, 1), column(b_gates, 2), b_last


@triton.jit
def residual_of(b_s, b_k, b_v, b_a, b_b, r_k, DOT: tl.constexpr):
    """Return transposed residuals Rᵀ = Vᵀ Ãᵀ − (γ ⊙ K̂ S)ᵀ Ãᵀ; the MMA of V can start before the state S is known.

    `b_s` is Sᵀ; Ã (`b_a`) is the inverse of the chunk's triangular matrix I + L̃ (README.md), γ = 2^b the decay since
    the chunk's start, and K̂ = r K are the keys times their inverse norms r.
    """
    b_y = tl.dot(b_s, tl.trans(b_k), input_precision=DOT) * -(tl.exp2(b_b) * r_k)[None, :]
    b_r = tl.dot(tl.trans(b_v), tl.trans(b_a), input_precision=DOT)
    return tl.dot(b_y.to(b_k.dtype), tl.trans(b_a), b_r, input_precision=DOT)


@triton.jit
def next_state(b_s, b_r, b_k, b_b, b_w, b_last, DOT: tl.constexpr):
    """Return the transposed state after the chunk, S'ᵀ = 2^b_last Sᵀ + (2^(b_last − b) w ⊙ R)ᵀ K.

    R are the residuals, and b the cumulative log2 decays with `b_last` at the chunk's end. w (`b_w`) is β times the
    keys' inverse norms.
    """
    b_r = (b_r * (b_w * tl.exp2(b_last - b_b))[None, :]).to(b_k.dtype)
    return tl.dot(b_r, b_k, b_s * tl.exp2(b_last), input_precision=DOT)


@triton.jit
def outputs(b_o, b_r, b_q, b_k, b_b, b_w, o_t, scale, L2NORM: tl.constexpr, DOT: tl.constexpr):
    """Return the outputs Oᵀ = scale (Sᵀ Qᵀ ⊙ γ + Rᵀ P'ᵀ), given `b_o` = Sᵀ Qᵀ; P'ᵀ = diag(w) triu(K Qᵀ ⊙ Γᵀ).

    `b_r` is Rᵀ, the transposed residuals; γ are the decays since the chunk's start, Γ those between two tokens of the
    chunk, and w (`b_w`) is β times the keys' inverse norms. L2NORM divides each output by the norm of its query.
    """
    b_p = tl.dot(b_k, tl.trans(b_q), input_precision=DOT)
    b_p = (b_p * causal_decay_transposed(b_b, b_b, o_t, o_t) * b_w[:, None]).to(b_k.dtype)
    b_o = tl.dot(b_r.to(b_k.dtype), b_p, b_o * tl.exp2(b_b)[None, :], input_precision=DOT)
    if L2NORM:
        return b_o * (inverse_norm(b_q, DOT) * scale)[None, :]
    return b_o * scale


@triton.jit
def head_state(slot, stride_state, i_hv, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr):
    """Return the offset in a pool of the state of value head `i_hv`; PARTS such heads are one head of the pool.

    They are blocks of V columns of its PARTS · V columns (`head_split`).
    """
    return slot * stride_state + (i_hv // PARTS) * (K * V * PARTS) + (i_hv % PARTS) * V


@cached_launch
@triton.jit(do_not_specialize=(*SIZES, "segment"))
def forward_kernel(
    q, k, v, inverse, gates, writes, initial_state, entering, cu_seqlens, order, o, final_state, residual, states,
    remainders, slots, fresh, stride_state, scale, T, N, H, group, tokens, segment,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, WRITES: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr, ORDERED: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute outputs and final states (if `o` is given); save R and the chunks' entering states (if `residual` is).

    `remainders` are the rounding errors of the saved states. With `entering` a program scans one segment. If the
    preceding segment begins with negligible chunks, the scan starts after them, from a zero state; else it starts at
    the segment's own first chunk, from the entering state. ORDERED: programs take segments, or sequences, in the order
    of `order`. WRITES chunks share a factor in `writes`. With `slots`, `initial_state` and `final_state` are one pool:
    if a sequence has several segments, its first one also starts from an entering state, a copy of the initial state,
    because the last segment's program may overwrite the slot earlier.
    """
    OUTPUT: tl.constexpr = o is not None
    SAVE: tl.constexpr = residual is not None
    REMAINDERS: tl.constexpr = remainders is not None
    SPLIT: tl.constexpr = entering is not None
    i_v, i_sh = tl.program_id(0) % (V // BV), tl.program_id(0) // (V // BV)
    HV = H * group
    i_s, i_hv = i_sh // HV, i_sh % HV
    if ORDERED:
        i_s = tl.load(order + i_s)
        i_sh = i_s * HV + i_hv
    if SPLIT:
        i_n, bos, length, first = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED)
        # an empty sequence also has one segment, whose program copies the initial state to the final state
        if first > 0 and first >= length:
            return
        end = tl.minimum(first + segment, length)
    else:
        i_n, first = i_s, 0
        bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        end = length
    begun = first
    if SPLIT and first > 0:
        p_before = gates + (i_hv.to(tl.int64) * tokens + bos + first - segment) * 4
        skipped = negligible_chunks(p_before, segment, BT, L2NORM, NEGLIGIBLE)
        if WRITES:
            p_w = writes + first_write(i_n, bos, T, BT, WRITES, PACKED) * HV + i_hv
            skipped = bounded(skipped, p_w, HV, first - segment, segment, BT, WRITES)
        begun = tl.where(skipped > 0, first - segment + skipped * BT, first)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, BV)
    p_tile = o_k[None, :] * V + i_v * BV + o_v[:, None]
    o_state = (i_n.to(tl.int64) * HV + i_hv) * K * V + p_tile
    row = bos + begun
    p_q, p_k = q + (row * H + i_hv // group) * K, k + (row * H + i_hv // group) * K
    o_vo = (row * HV + i_hv) * V + i_v * BV
    p_v = v + o_vo
    if OUTPUT:
        p_o = o + o_vo
    if SAVE:
        p_r = residual + o_vo
    p_a = inverse + (row * HV + i_hv) * BT
    p_gates = gates + (i_hv.to(tl.int64) * tokens + row) * 4
    slot = first_chunk(i_n, bos, T, BT, PACKED) + begun // BT
    o_s = (slot.to(tl.int64) * HV + i_hv) * K * V
    if SAVE:
        p_s = states + o_s + p_tile
    if REMAINDERS:
        p_m = remainders + o_s + p_tile

    # a segment starts from an entering state if its first token's position exceeds `whole`; with slots and several
    # segments `whole` is −1, so that the first segment does so, too
    whole = 0
    if slots is not None:
        i_slot, held = locate_slot(i_n, slots, fresh)
        o_state = head_state(i_slot, stride_state, i_hv, K, V, PARTS) + o_k[None, :] * (V * PARTS)
        o_state = o_state + i_v * BV + o_v[:, None]
        if SPLIT:
            held = held & (length <= segment)
            whole = tl.where(length > segment, -1, 0)
        b_s = tl.load(initial_state + o_state, mask=o_k[None, :] < tl.where(held, K, 0), other=0.0).to(tl.float32)
    elif initial_state is not None:
        b_s = tl.load(initial_state + o_state).to(tl.float32)
    else:
        b_s = tl.zeros([BV, K], tl.float32)
    if SPLIT and first > whole:
        known = tl.where(begun < first, 0, K)
        b_s = tl.load(entering + i_sh.to(tl.int64) * K * V + p_tile, mask=o_k[None, :] < known, other=0.0)

    # b_bare: the state without the writes of the WRITES chunks that share the current factor
    if WRITES > 1:
        b_bare = b_s
    for start in range(begun, end, BT):
        rows = length - start
        # results of the chunks before the segment are not stored
        stored_rows, stored = rows, K
        if SPLIT:
            stored_rows, stored = tl.where(start < first, 0, rows), tl.where(start < first, 0, K)
        b_k = load_rows(p_k, H * K, rows, BT, K)
        b_v = load_rows(p_v, HV * V, rows, BT, BV)
        b_a = load_rows(p_a, HV * BT, rows, BT, BT)
        b_b, b_w, r_k, b_last = chunk_gates(p_gates, rows, BT)
        if OUTPUT:
            b_q = load_rows(p_q, H * K, rows, BT, K)
        b_h = b_s.to(k.dtype.element_ty)
        if REMAINDERS:
            tl.store(p_m, (b_s - b_h.to(tl.float32)).to(k.dtype.element_ty), mask=o_k[None, :] < stored)
        if OUTPUT:
            b_o = tl.dot(b_h, tl.trans(b_q), input_precision=DOT)
        b_r = residual_of(b_h, b_k, b_v, b_a, b_b, r_k, DOT)
        if WRITES:
            p_w = writes + (first_write(i_n, bos, T, BT, WRITES, PACKED) + start // (BT * WRITES)) * HV + i_hv
            share = tl.load(p_w).to(tl.float32)
        if WRITES == 1:
            b_s = next_state(b_s, b_r, b_k, b_b, b_w * share, b_last, DOT)
        else:
            b_s = next_state(b_s, b_r, b_k, b_b, b_w, b_last, DOT)
        if WRITES > 1:
            b_bare *= tl.exp2(b_last)
            if ((start // BT + 1) % WRITES == 0) | (start + BT >= length):
                b_s = b_bare + share * (b_s - b_bare)
                b_bare = b_s
        if SAVE:
            tl.store(p_s, b_h, mask=o_k[None, :] < stored)
            store_rows(p_r, tl.trans(b_r.to(k.dtype.element_ty)), HV * V, stored_rows, BT, BV)
        if OUTPUT:
            b_o = outputs(b_o, b_r, b_q, b_k, b_b, b_w, o_t, scale, L2NORM, DOT)
            store_rows(p_o, tl.trans(b_o.to(o.dtype.element_ty)), HV * V, stored_rows, BT, BV)

        p_q += BT * H * K
        p_k += BT * H * K
        p_v += BT * HV * V
        p_a += BT * HV * BT
        p_gates += BT * 4
        if OUTPUT:
            p_o += BT * HV * V
        if SAVE:
            p_r += BT * HV * V
            p_s += HV * K * V
        if REMAINDERS:
            p_m += HV * K * V

    if OUTPUT and end >= length:
        if slots is not None:
            tl.store(final_state + o_state, b_s, mask=o_k[None, :] < tl.where(i_slot >= 0, K, 0))
        else:
            tl.store(final_state + o_state, b_s)


def forward(
    x: Inputs,
    terms: Terms,
    *,
    segment: int,
    form: Form,
    output: bool = True,
    saved: Saved | None = None,
    pool: Pool | None = None,
) -> tuple[Any, Any]:
    """Return outputs and final states (None without `output`); write R, chunk states and remainders into `saved`.

    Programs scan whole sequences or, if `terms.entering` is given, segments of `segment` tokens. With `pool` they read
    initial states from its slots, and overwrite these with the final states, which are not returned.
    """
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.q, x.cu_seqlens)
    o = torch.empty_like(x.v) if output else None
    final_state = x.v.new_empty(N, HV, K, V, dtype=torch.float32) if output and pool is None else None
    residual, states, remainders = saved or (None, None, None)
    programs = N if terms.entering is None else len(terms.entering)
    segment = 0 if terms.entering is None else segment
    order = longest_first(T, segment, x.cu_seqlens)
    if form != "triton":
        written = {"order": order, "segment": segment, "o": o, "final_state": final_state, "saved": saved, "pool": pool}
        if form == "gluon":
            from tokenmix_core.ops.gated_delta_rule.hopper import forward as on_hopper

            on_hopper.forward(x, terms, **written)
        else:
            from tokenmix_core.ops.gated_delta_rule.hopper import forward_tiled as by_tiles

            by_tiles.forward_tiled(x, terms, **written)
        return o, final_state
    launch = tuning.scan_tile("forward" if output else "states", K, V, x.q.element_size(), programs * HV)
    BV = min(V, launch.BV)
    forward_kernel[(programs * HV * (V // BV),)](
        q=x.q, k=x.k, v=x.v, inverse=terms.inverse, gates=terms.gates, writes=x.writes,
        **state_arguments(x, final_state, pool), entering=terms.entering, cu_seqlens=x.cu_seqlens, order=order, o=o,
        residual=residual, states=states, remainders=remainders, scale=x.scale, T=T, N=N, H=H, group=HV // H,
        tokens=B * T, segment=segment, K=K, V=V, BT=CHUNK, BV=BV, WRITES=x.chunks_per_write, L2NORM=x.qk_l2norm,
        PACKED=x.cu_seqlens is not None, ORDERED=order is not None, DOT=dot_precision(x.q),
        num_warps=launch.num_warps * BV // launch.BV, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
    )  # fmt: skip
    return o, final_state


def empty_saved(x: Inputs, remainders: bool) -> Saved:
    """Allocate tensors for residuals R, the states of all chunks and, if `remainders`, the states' rounding errors."""
    residual, states = (x.v.new_empty(shape) for shape, _ in state_layouts(x.k, x.v, x.cu_seqlens))
    return Saved(residual, states, torch.empty_like(states) if remainders else None)
