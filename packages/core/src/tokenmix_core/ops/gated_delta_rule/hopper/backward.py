"""The backward pass after S and R on Hopper: a segment and value head a program, whose warps share out a chunk's work.

One group of four warps copies, two run backwards along the chunks with 64 columns of dS each (`backward_chain.py`), and
one makes the gradients of a chunk from the dS' and dY that those hand to it. So dS stays on the chip, and what is not
part of the chain from dS' to dS is done beside it. Heads of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.gluon.hopper import (
    LOG2_E,
    LOWEST,
    add,
    causal_decay,
    first_chunk,
    log2,
    mma_layout,
    opaque,
    pointer_or,
    scale_tile,
    store_rows,
    widen,
)
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.hopper.backward_chain import (
    BARRIERS,
    DS_READ,
    DS_THERE,
    DY_READ,
    DY_THERE,
    EMPTY,
    FULL,
    MADE,
    PLACES,
    R_READ,
    R_THERE,
    S_READ,
    S_THERE,
    SUMMED,
    announce,
    copy_chunks,
    load_last,
    run_back,
)
from tokenmix_core.ops.gated_delta_rule.hopper.backward_chunk import (
    SMALLEST,
    accumulate,
    multiply,
    nonzero,
    scale_rows,
    square,
)
from tokenmix_core.ops.gated_delta_rule.hopper.backward_state import between_segments
from tokenmix_core.ops.gated_delta_rule.hopper.gates import room
from tokenmix_core.ops.gated_delta_rule.hopper.segments import locate_segment, start_after
from tokenmix_core.ops.gated_delta_rule.tile_order import longest_first
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Reverse


@gluon.jit
def dot_rows(b_x, s_y, row: gl.constexpr, D: gl.constexpr):
    """Σ x y of each row of X in registers and Y in shared memory."""
    return gl.convert_layout(gl.sum(b_x * widen(s_y.load(mma_layout(D, 4))), 1), row)


@gluon.jit
def unnormalise(b_dx, b_x, r_i, row: gl.constexpr, D: gl.constexpr):
    """x̂ · dx̂ and, from r times the gradient of x̂ = r x with r = (Σ x² + ε)^−½, that of x: r dx̂ − r x̂ (x̂ · dx̂)."""
    b_x = widen(b_x)
    dot_i = gl.convert_layout(gl.sum(b_dx * b_x, 1), row)
    return dot_i, b_dx - scale_rows(b_x, r_i * r_i * dot_i, D)


@gluon.jit
def columns(g_w, g_r, col: gl.constexpr, dtype: gl.constexpr, ROOM: gl.constexpr):
    """β r or, where the dtype has no room for a small β, what gradients can be divided by in its place, and `room`."""
    w_j = g_w.load(col)
    if dtype != gl.bfloat16:
        w_j = nonzero(w_j, g_r.load(col)) * ROOM
    return w_j


@gluon.jit
def keep(b_x, s_x, g_w, g_r, col: gl.constexpr):
    """Store X, which has `columns` as a factor, and return it with β r and `room` in their place."""
    dtype: gl.constexpr = s_x.dtype
    s_x.store(b_x.to(dtype))
    if dtype != gl.bfloat16:
        w_j, r_j = g_w.load(col), g_r.load(col)
        b_x *= gl.where(w_j > SMALLEST * r_j, 1.0, w_j * gl.exp2(-log2(r_j)))[None, :]
    return b_x.to(dtype)


@gluon.jit
def write_gradients(pointers, tiles, places, barriers, scale, length, steps, warm, HV: gl.constexpr):
    """dQ, dK, dg and dβ of each chunk but the first `warm`. Vectors by row are `x_i`, by column `x_j`."""
    p_g, p_dq, p_dk, p_dg, p_dbeta = pointers
    q_s, k_s, do_s, gates_s = places
    r_1, s_1, ds_1, dy_1, ef_1, s_ends, s_db = tiles
    dtype: gl.constexpr = k_s.dtype
    BT: gl.constexpr = k_s.shape[1]
    D: gl.constexpr = k_s.shape[2]
    ROOM: gl.constexpr = room(dtype, D)
    row: gl.constexpr = gl.SliceLayout(1, mma_layout(BT, 4))
    col: gl.constexpr = gl.SliceLayout(0, mma_layout(BT, 4))
    left: gl.constexpr = gl.DotOperandLayout(0, mma_layout(D, 4), 2)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    for i in range(warm):
        mbarrier.wait(barriers.index(FULL + i % PLACES), (i // PLACES) & 1)
        mbarrier.arrive(barriers.index(EMPTY + i % PLACES))
        mbarrier.wait(barriers.index(DS_THERE), i & 1)
        mbarrier.arrive(barriers.index(DS_READ))
    for i in range(warm, steps):
        here, parity = i % PLACES, (i - warm) & 1
        s_q, s_k, s_do = q_s.index(here), k_s.index(here), do_s.index(here)
        g_b, g_w = gates_s.index(here * 4), gates_s.index(here * 4 + 1)
        g_r, g_n = gates_s.index(here * 4 + 2), gates_s.index(here * 4 + 3)
        at = opaque(0)
        s_r, s_s, s_ds, s_dy, s_ef = r_1.index(at), s_1.index(at), ds_1.index(at), dy_1.index(at), ef_1.index(at)
        s_e, s_f = square(s_ef, 0, D), square(s_ef, 1, D)
        o_i, o_j, o_t = opaque(gl.arange(0, BT, row)), opaque(gl.arange(0, BT, col)), opaque(gl.arange(0, BT, line))
        # counted from the last chunk
        t_0 = -i * BT
        o_0, rows = t_0.to(gl.int64) * HV, length - t_0
        mbarrier.wait(barriers.index(FULL + here), (i // PLACES) & 1)
        mbarrier.wait(barriers.index(R_THERE), parity)
        fence_async_shared()

        # E = scale dO Rᵀ ⊙ Γ meets β K̂, and as Eᵀ Q̂: dQ̂ = scale γ dO Sᵀ + E β K̂
        b_e = multiply(s_do, s_r.permute((1, 0)), BT)
        mbarrier.wait(barriers.index(S_THERE), parity)
        fence_async_shared()
        b_dq = multiply(s_do, s_s.permute((1, 0)), D)
        b_i, w_i, r_i = g_b.load(row), g_w.load(row), g_r.load(row)
        d_i = w_i
        if dtype != gl.bfloat16:
            d_i = nonzero(w_i, r_i) * ROOM
        mbarrier.wait(barriers.index(MADE + here), (i // PLACES) & 1)
        rq_i = g_n.load(row)
        b_c = causal_decay(b_i + log2(rq_i), g_b.load(col), o_i, o_j)
        b_c *= (columns(g_w, g_r, col, dtype, ROOM) * scale)[None, :]
        b_e = warpgroup_mma_wait(1, deps=[b_e])
        b_e = keep(b_e * b_c, s_e, g_w, g_r, col)
        b_dq = warpgroup_mma_wait(0, deps=[b_dq])
        b_dq = scale_rows(b_dq, gl.exp2(b_i) * scale * rq_i * ROOM, D)
        b_dq = accumulate(gl.convert_layout(b_e, left), s_k, b_dq)
        b_q = s_q.load(mma_layout(D, 4))
        b_dq = warpgroup_mma_wait(0, deps=[b_dq]) * (1 / ROOM)
        dot_i, b_dq = unnormalise(b_dq, b_q, rq_i, row, D)
        b_dq = b_dq.to(dtype)
        b_first, b_second = gl.split(b_dq.reshape([BT, 2, D // 2]).permute((0, 2, 1)))
        s_f.store(b_first)
        store_rows(p_dq + o_0 * D, s_f, HV * D, rows, 4)
        s_f.store(b_second)
        store_rows(p_dq + o_0 * D + D // 2, s_f, HV * D, rows, 4)

        # F = −dY Rᵀ ⊙ Γ, strictly below the diagonal, meets β K̂, and as Fᵀ K̂
        mbarrier.wait(barriers.index(DY_THERE), parity)
        b_f = multiply(s_dy, s_r.permute((1, 0)), BT)
        mbarrier.wait(barriers.index(DS_THERE), i & 1)
        b_dk = multiply(s_r, s_ds.permute((1, 0)), D)
        o_i, o_j = opaque(gl.arange(0, BT, row)), opaque(gl.arange(0, BT, col))
        b_c = causal_decay(b_i + log2(r_i), g_b.load(col), o_i, o_j + 1)
        b_c *= -columns(g_w, g_r, col, dtype, ROOM)[None, :]
        b_f = warpgroup_mma_wait(1, deps=[b_f])
        b_f = keep(b_f * b_c, s_f, g_w, g_r, col)

        # X = w R dSᵀ + Eᵀ Q̂ + Fᵀ K̂ is the gradient of β K̂
        fence_async_shared()
        b_dk = warpgroup_mma_wait(0, deps=[b_dk])
        mbarrier.arrive(barriers.index(DS_READ))
        mbarrier.arrive(barriers.index(R_READ))
        b_dk = scale_rows(b_dk, gl.exp2(load_last(g_b, row) - b_i) * d_i, D)
        b_dk = accumulate(s_e.permute((1, 0)), s_q, b_dk)
        b_dk = accumulate(s_f.permute((1, 0)), s_k, b_dk)
        b_y = s_dy.load(left)
        y_i = gl.convert_layout(-gl.exp2(b_i) * r_i * ROOM, gl.SliceLayout(1, left))
        b_y = scale_tile(b_y, y_i[:, None])
        b_dk = warpgroup_mma_wait(0, deps=[b_dk])
        dbeta_i = dot_rows(b_dk, s_k, row, D) * (r_i / d_i)

        # dK̂ = β X − γ dY Sᵀ + F β K̂
        if dtype != gl.bfloat16:
            b_dk = scale_rows(b_dk, w_i / d_i * ROOM, D)
        b_dk = accumulate(b_y, s_s.permute((1, 0)), b_dk)
        b_dk = accumulate(gl.convert_layout(b_f, left), s_k, b_dk)
        gl.store(p_dbeta + o_0 + o_i * HV, dbeta_i.to(p_dbeta.dtype.element_ty), mask=o_i < rows)
        g_t = gl.load(p_g + o_0 + o_t * HV, mask=o_t < rows, other=0.0).to(gl.float32)
        mbarrier.wait(barriers.index(SUMMED), parity)
        end = gl.sum(s_ends.load(line), 0)
        b_dk = warpgroup_mma_wait(0, deps=[b_dk]) * (1 / ROOM)
        mbarrier.arrive(barriers.index(DY_READ))
        mbarrier.arrive(barriers.index(S_READ))
        dot_k_i, b_dk = unnormalise(b_dk, s_k.load(mma_layout(D, 4)), r_i, row, D)
        s_db.store(gl.where(o_i < rows, dot_i + dot_k_i - 2 * (w_i / r_i) * dbeta_i, 0.0))
        s_ef.store(b_dk.to(dtype))
        store_rows(p_dk + o_0 * D, s_ef, HV * D, rows, 4)
        # dg gathers all later decays of the chunk, each warp on its own; a decay that was cut off has none
        dg_t = gl.associative_scan(s_db.load(line), 0, add, reverse=True) + end
        dg_t = gl.where(g_t * LOG2_E < LOWEST, 0.0, dg_t)
        gl.store(p_dg + o_0 + o_t * HV, dg_t.to(p_dg.dtype.element_ty), mask=o_t < rows)
        mbarrier.arrive(barriers.index(EMPTY + here))


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "tokens", "segment"])
def backward_kernel(
    q, k, g, inverse, gates, cu_seqlens, order, states, residual, do, dfinal_state, passed,
    dq, dk, dv, dg, dbeta, dinitial_state, scale, T, N, tokens, segment,
    H: gl.constexpr, HV: gl.constexpr, D: gl.constexpr, BT: gl.constexpr, PACKED: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """All gradients; of the final state there may be none, nor may the initial state's be wanted.

    ORDERED: programs take segments by `order`. What is passed back to a segment lies in `passed`, if the one that
    passes it remembers; without it a segment starts as far back as it takes.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places: gl.constexpr = PLACES
    i_s, i_hv, i_n, begin, length, start = locate_segment(
        gl.program_id(0), order, T, N, HV, segment, cu_seqlens, PACKED, ORDERED, 4
    )
    # an empty sequence has a segment too, which hands its gradient on
    if (start >= length) & (start > 0):
        return
    slot = first_chunk(i_n, begin, T, BT, PACKED)
    # an empty sequence may begin past the last token
    p_gates = gates + (i_hv.to(gl.int64) * tokens + gl.minimum(begin, tokens - 1)) * 4
    chunks, first = gl.cdiv(length, BT), start // BT
    end = gl.minimum(chunks, first + segment // BT)
    started = start_after(
        p_gates, None, slot, i_hv, HV, first, end, chunks, segment, length, line, True, False, passed is not None
    )
    o_state = (i_n.to(gl.int64) * HV + i_hv) * D * D
    p_initial, known, wanted = pointer_or(passed, gates) + ((i_s + 1).to(gl.int64) * HV + i_hv) * D * D, 0, 0
    if passed is not None and (started == end) & (end < chunks):
        known = D
    if dfinal_state is not None and started == chunks:
        p_initial = dfinal_state + o_state
        known = D
    if dinitial_state is not None and first == 0:
        wanted = D

    q_s = gl.allocate_shared_memory(dtype, [places, BT, D], shared)
    k_s = gl.allocate_shared_memory(dtype, [places, BT, D], shared)
    do_s = gl.allocate_shared_memory(dtype, [places, BT, D], shared)
    s_a = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    r_1 = gl.allocate_shared_memory(dtype, [1, BT, D], shared)
    s_1 = gl.allocate_shared_memory(dtype, [1, D, D], shared)
    ds_1 = gl.allocate_shared_memory(dtype, [1, D, D], shared)
    dy_1 = gl.allocate_shared_memory(dtype, [1, BT, D], shared)
    # Eᵀ; dQ on its way out, then Fᵀ; in place of both dK on its way out
    ef_1 = gl.allocate_shared_memory(dtype, [1, BT, D], shared)
    # b, β r, r and the norms of q
    gates_s = gl.allocate_shared_memory(gl.float32, [places * 4, BT], vector)
    s_ends = gl.allocate_shared_memory(gl.float32, [64], vector)
    s_db = gl.allocate_shared_memory(gl.float32, [BT], vector)
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    announce(barriers)

    token = gl.maximum(started - 1, 0) * BT
    steps, warm, rows = started - first, started - end, length - token
    at = begin + token
    o_qk, o_t = (at * H + i_hv // (HV // H)) * D, at * HV + i_hv
    o_vo, o_s = o_t * D, ((slot + token // BT) * HV + i_hv) * D * D
    p_gates += token.to(gl.int64) * 4
    inputs = (q + o_qk, k + o_qk, do + o_vo, inverse + o_t * BT, residual + o_vo, states + o_s, p_gates)
    ends = (p_initial, pointer_or(dinitial_state, gates) + o_state, dv + o_vo)
    outputs = (g + o_t, dq + o_vo, dk + o_vo, dg + o_t, dbeta + o_t)
    chunk, read, chain = (q_s, k_s, do_s, gates_s), (s_a, s_1, r_1), (ds_1, dy_1, s_p, s_ends)
    sums = (r_1, s_1, ds_1, dy_1, ef_1, s_ends, s_db)
    # 16 warps of 128 registers; the first group takes those that the others leave
    gl.warp_specialize(
        [
            (write_gradients, (outputs, sums, chunk, barriers, scale, rows, steps, warm, HV)),
            (run_back, (ends, read, chunk, chain, barriers, scale, rows, steps, warm, known, wanted, HV, 0)),
            (run_back, (ends, read, chunk, chain, barriers, scale, rows, steps, warm, known, wanted, HV, 64)),
            (copy_chunks, (inputs, read, chunk, barriers, rows, steps, warm, H, HV)),
        ],
        [4, 4, 4], [144, 152, 32],
    )  # fmt: skip


def backward(reverse: Reverse, grads: Gradients) -> None:
    """Write dq and dk of each value head, and all other gradients, into `grads`; as `backward_state` about segments.

    q and k are normalised by the operation.
    """
    x, terms, saved, do, dfinal_state, segment = reverse
    B, T, H, D = x.q.shape
    HV = x.v.shape[2]
    order = longest_first(T, segment, x.cu_seqlens)
    passed = between_segments(reverse)
    backward_kernel[(chunk_slots(B, T, segment, x.cu_seqlens) * HV,)](
        q=x.q, k=x.k, g=x.g, inverse=terms.inverse, gates=terms.gates, cu_seqlens=x.cu_seqlens, order=order,
        states=saved.states, residual=saved.residual, do=do, dfinal_state=dfinal_state, passed=passed, dq=grads.q,
        dk=grads.k, dv=grads.v, dg=grads.g, dbeta=grads.beta, dinitial_state=grads.initial_state, scale=x.scale, T=T,
        N=num_sequences(x.q, x.cu_seqlens), tokens=B * T, segment=segment, H=H, HV=HV, D=D, BT=CHUNK,
        PACKED=x.cu_seqlens is not None, ORDERED=order is not None, num_warps=4,
    )  # fmt: skip
