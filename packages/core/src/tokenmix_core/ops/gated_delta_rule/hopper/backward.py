"""Fused backward on Hopper, warp-specialised, for heads of 128: one program per segment and value head.

    producer      q k dO ─ cp.async, NUM_STAGES; Ã R S ─ cp.async, 1 stage ─► smem; gates ─► smem
                     │ FULL, A_FULL, …            ▲ EMPTY, A_EMPTY, …
    reverse scan  P' (SCORES) ─► dR ─► dY = Ãᵀ dR ─► dV;  dS ← 2^b dS + Qᵀ(γ dO) − Kᵀ(γ dY)   64 columns per warpgroup
      2 warpgroups   │ dS', dY ─► smem, 1 stage: DS_FULL, DY_FULL      ▲ DS_EMPTY, DY_EMPTY     dS in registers
    epilogue      E, F, X ─► dQ, dK, dg, dβ ─► store

The kernel reads the residuals R and states S of all chunks. dS stays in registers and shared memory. All work that the
chain from dS' to dS does not depend on runs in other warpgroups. `backward_chain.py` has the producer and the reverse
scan; `backward_chunk.py` has the formulas of E, F and X, and README.md those of the scan.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.gluon.hopper import LOG2_E, LOWEST
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.hopper import backward_chunk
from tokenmix_core.ops.gated_delta_rule.hopper.backward_chain import (
    BARRIERS,
    DS_EMPTY,
    DS_FULL,
    DY_EMPTY,
    DY_FULL,
    EMPTY,
    FULL,
    NUM_STAGES,
    R_EMPTY,
    R_FULL,
    S_EMPTY,
    S_FULL,
    SCORES,
    SUMMED,
    Span,
    initialise_barriers,
    load_last,
    producer,
    reverse_scan,
)
from tokenmix_core.ops.gated_delta_rule.hopper.backward_chunk import SMALLEST
from tokenmix_core.ops.gated_delta_rule.hopper.backward_state import between_segments
from tokenmix_core.ops.gated_delta_rule.hopper.gates import range_factor
from tokenmix_core.ops.gated_delta_rule.hopper.segments import Chunks, Factors, locate_segment, reverse_scan_start
from tokenmix_core.ops.gated_delta_rule.tile_order import longest_first
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Reverse


@gluon.jit
def dot_rows(b_x, s_y, row: gl.constexpr, D: gl.constexpr):
    """Return ⟨x_i, y_i⟩ for every row i, with X in registers (`b_x`) and Y in shared memory (`s_y`)."""
    return gl.convert_layout(gl.sum(b_x * hopper.widen(s_y.load(hopper.mma_layout(D, 4))), 1), row)


@gluon.jit
def unnormalise(b_dx, b_x, r_i, row: gl.constexpr, D: gl.constexpr):
    """Return x̂ · dx̂ and dx = r dx̂ − r x̂ (x̂ · dx̂), for x̂ = r x and r = (Σ x² + ε)^−½; `b_dx` holds r dx̂."""
    b_x = hopper.widen(b_x)
    dot_i = gl.convert_layout(gl.sum(b_dx * b_x, 1), row)
    return dot_i, b_dx - backward_chunk.scale_rows(b_x, r_i * r_i * dot_i, D)


@gluon.jit
def column_factors(g_w, g_r, col: gl.constexpr, dtype: gl.constexpr, RANGE: gl.constexpr):
    """Return the factors of E's and F's columns: β r if bfloat16; `nonzero(β r, r)` · RANGE if float16.

    E and F are matrices of `backward_chunk.py`; r are the keys' inverse norms.
    """
    w_j = g_w.load(col)
    if dtype != gl.bfloat16:
        w_j = backward_chunk.nonzero(w_j, g_r.load(col)) * RANGE
    return w_j


@gluon.jit
def store_scaled(b_x, s_x, g_w, g_r, col: gl.constexpr):
    """Store `b_x`, a matrix scaled by `column_factors`; return it scaled by β r · `range_factor` instead.

    r are the keys' inverse norms.
    """
    dtype: gl.constexpr = s_x.dtype
    s_x.store(b_x.to(dtype))
    if dtype != gl.bfloat16:
        w_j, r_j = g_w.load(col), g_r.load(col)
        b_x *= gl.where(w_j > SMALLEST * r_j, 1.0, w_j * gl.exp2(-hopper.log2(r_j)))[None, :]
    return b_x.to(dtype)


@gluon.jit
def epilogue(pointers, tiles, stages, barriers, scale, length, steps, warm, HV: gl.constexpr):
    """Write dQ, dK, dg and dβ of each scanned chunk but the first `warm`, which belong to later segments.

    Vectors named `…_i` have the layout of a tile's rows, vectors named `…_j` the layout of its columns.
    """
    p_g, p_dq, p_dk, p_dg, p_dbeta = pointers
    q_s, k_s, do_s, gates_s = stages
    r_1, s_1, ds_1, dy_1, ef_1, s_ends, s_db = tiles
    dtype: gl.constexpr = k_s.dtype
    BT: gl.constexpr = k_s.shape[1]
    D: gl.constexpr = k_s.shape[2]
    RANGE: gl.constexpr = range_factor(dtype, D)
    row: gl.constexpr = gl.SliceLayout(1, hopper.mma_layout(BT, 4))
    col: gl.constexpr = gl.SliceLayout(0, hopper.mma_layout(BT, 4))
    left: gl.constexpr = gl.DotOperandLayout(0, hopper.mma_layout(D, 4), 2)
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    for i in range(warm):
        mbarrier.wait(barriers.index(FULL + i % NUM_STAGES), hopper.parity(i, NUM_STAGES))
        mbarrier.arrive(barriers.index(EMPTY + i % NUM_STAGES))
        mbarrier.wait(barriers.index(DS_FULL), hopper.parity(i, 1))
        mbarrier.arrive(barriers.index(DS_EMPTY))
    for i in range(warm, steps):
        stage, phase = i % NUM_STAGES, hopper.parity(i - warm, 1)
        s_q, s_k, s_do = q_s.index(stage), k_s.index(stage), do_s.index(stage)
        g_b, g_w = gates_s.index(stage * 4), gates_s.index(stage * 4 + 1)
        g_r, g_n = gates_s.index(stage * 4 + 2), gates_s.index(stage * 4 + 3)
        at = hopper.opaque(0)
        s_r, s_s, s_ds, s_dy, s_ef = r_1.index(at), s_1.index(at), ds_1.index(at), dy_1.index(at), ef_1.index(at)
        s_e, s_f = backward_chunk.square(s_ef, 0, D), backward_chunk.square(s_ef, 1, D)
        o_i, o_j, o_t = (
            hopper.opaque(gl.arange(0, BT, row)),
            hopper.opaque(gl.arange(0, BT, col)),
            hopper.opaque(gl.arange(0, BT, line)),
        )
        # the pointers point at the last chunk, so the offsets of earlier chunks are negative
        t_0 = -i * BT
        o_0, rows = t_0.to(gl.int64) * HV, length - t_0
        mbarrier.wait(barriers.index(FULL + stage), hopper.parity(i, NUM_STAGES))
        mbarrier.wait(barriers.index(R_FULL), phase)
        fence_async_shared()

        # E = scale (dO Rᵀ) ⊙ Γ; dQ̂ = scale γ dO Sᵀ + E β K̂ (R: residuals, Γ: decay from token j to i, γ: from the
        # chunk's start)
        b_e = backward_chunk.multiply(s_do, s_r.permute((1, 0)), BT)
        mbarrier.wait(barriers.index(S_FULL), phase)
        fence_async_shared()
        b_dq = backward_chunk.multiply(s_do, s_s.permute((1, 0)), D)
        b_i, w_i, r_i = g_b.load(row), g_w.load(row), g_r.load(row)
        d_i = w_i
        if dtype != gl.bfloat16:
            d_i = backward_chunk.nonzero(w_i, r_i) * RANGE
        mbarrier.wait(barriers.index(SCORES + stage), hopper.parity(i, NUM_STAGES))
        rq_i = g_n.load(row)
        b_c = hopper.causal_decay(b_i + hopper.log2(rq_i), g_b.load(col), o_i, o_j)
        b_c *= (column_factors(g_w, g_r, col, dtype, RANGE) * scale)[None, :]
        b_e = warpgroup_mma_wait(1, deps=[b_e])
        b_e = store_scaled(b_e * b_c, s_e, g_w, g_r, col)
        b_dq = warpgroup_mma_wait(0, deps=[b_dq])
        b_dq = backward_chunk.scale_rows(b_dq, gl.exp2(b_i) * scale * rq_i * RANGE, D)
        b_dq = backward_chunk.accumulate(gl.convert_layout(b_e, left), s_k, b_dq)
        b_q = s_q.load(hopper.mma_layout(D, 4))
        b_dq = warpgroup_mma_wait(0, deps=[b_dq]) * (1 / RANGE)
        dot_i, b_dq = unnormalise(b_dq, b_q, rq_i, row, D)
        b_dq = b_dq.to(dtype)
        b_first, b_second = gl.split(b_dq.reshape([BT, 2, D // 2]).permute((0, 2, 1)))
        s_f.store(b_first)
        hopper.store_rows(p_dq + o_0 * D, s_f, HV * D, rows, 4)
        s_f.store(b_second)
        hopper.store_rows(p_dq + o_0 * D + D // 2, s_f, HV * D, rows, 4)

        # F = −(dY Rᵀ) ⊙ Γ without its diagonal; dY = dV, R: residuals, Γ: decays between the chunk's tokens
        mbarrier.wait(barriers.index(DY_FULL), phase)
        b_f = backward_chunk.multiply(s_dy, s_r.permute((1, 0)), BT)
        mbarrier.wait(barriers.index(DS_FULL), hopper.parity(i, 1))
        b_dk = backward_chunk.multiply(s_r, s_ds.permute((1, 0)), D)
        o_i, o_j = hopper.opaque(gl.arange(0, BT, row)), hopper.opaque(gl.arange(0, BT, col))
        b_c = hopper.causal_decay(b_i + hopper.log2(r_i), g_b.load(col), o_i, o_j + 1)
        b_c *= -column_factors(g_w, g_r, col, dtype, RANGE)[None, :]
        b_f = warpgroup_mma_wait(1, deps=[b_f])
        b_f = store_scaled(b_f * b_c, s_f, g_w, g_r, col)

        # X = w R dS'ᵀ + Eᵀ Q̂ + Fᵀ K̂ is the gradient of β K̂; w: decay from a token to the chunk's end
        fence_async_shared()
        b_dk = warpgroup_mma_wait(0, deps=[b_dk])
        mbarrier.arrive(barriers.index(DS_EMPTY))
        mbarrier.arrive(barriers.index(R_EMPTY))
        b_dk = backward_chunk.scale_rows(b_dk, gl.exp2(load_last(g_b, row) - b_i) * d_i, D)
        b_dk = backward_chunk.accumulate(s_e.permute((1, 0)), s_q, b_dk)
        b_dk = backward_chunk.accumulate(s_f.permute((1, 0)), s_k, b_dk)
        b_y = s_dy.load(left)
        y_i = gl.convert_layout(-gl.exp2(b_i) * r_i * RANGE, gl.SliceLayout(1, left))
        b_y = hopper.scale_tile(b_y, y_i[:, None])
        b_dk = warpgroup_mma_wait(0, deps=[b_dk])
        dbeta_i = dot_rows(b_dk, s_k, row, D) * (r_i / d_i)

        # dK̂ = β X − γ dY Sᵀ + F β K̂, with β and γ as diagonal matrices (γ: decays since the chunk's start)
        if dtype != gl.bfloat16:
            b_dk = backward_chunk.scale_rows(b_dk, w_i / d_i * RANGE, D)
        b_dk = backward_chunk.accumulate(b_y, s_s.permute((1, 0)), b_dk)
        b_dk = backward_chunk.accumulate(gl.convert_layout(b_f, left), s_k, b_dk)
        gl.store(p_dbeta + o_0 + o_i * HV, dbeta_i.to(p_dbeta.dtype.element_ty), mask=o_i < rows)
        g_t = gl.load(p_g + o_0 + o_t * HV, mask=o_t < rows, other=0.0).to(gl.float32)
        mbarrier.wait(barriers.index(SUMMED), phase)
        end = gl.sum(s_ends.load(line), 0)
        b_dk = warpgroup_mma_wait(0, deps=[b_dk]) * (1 / RANGE)
        mbarrier.arrive(barriers.index(DY_EMPTY))
        mbarrier.arrive(barriers.index(S_EMPTY))
        dot_k_i, b_dk = unnormalise(b_dk, s_k.load(hopper.mma_layout(D, 4)), r_i, row, D)
        s_db.store(gl.where(o_i < rows, dot_i + dot_k_i - 2 * (w_i / r_i) * dbeta_i, 0.0))
        s_ef.store(b_dk.to(dtype))
        hopper.store_rows(p_dk + o_0 * D, s_ef, HV * D, rows, 4)
        # dg_t is the sum of db, the gradient of the cumulative decay b, from t to the chunk's end, plus the gradient of
        # b_last (`end`). Every warp computes the whole vector. dg is zero where the decay is clamped.
        dg_t = gl.associative_scan(s_db.load(line), 0, hopper.add, reverse=True) + end
        dg_t = gl.where(g_t * LOG2_E < LOWEST, 0.0, dg_t)
        gl.store(p_dg + o_0 + o_t * HV, dg_t.to(p_dg.dtype.element_ty), mask=o_t < rows)
        mbarrier.arrive(barriers.index(EMPTY + stage))


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "tokens", "segment"])
def backward_kernel(
    q, k, g, inverse, gates, cu_seqlens, order, states, residual, do, dfinal_state, passed,
    dq, dk, dv, dg, dbeta, dinitial_state, scale, T, N, tokens, segment,
    H: gl.constexpr, HV: gl.constexpr, D: gl.constexpr, BT: gl.constexpr, PACKED: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Compute all gradients of a segment and value head; `dfinal_state` and `dinitial_state` may be None.

    ORDERED: programs take segments in the order of `order`. `passed` holds the gradient of each segment's entering
    state; the preceding segment's reverse scan starts from it. If the decay of the next segment is negligible, or
    without `passed`, the scan of a segment starts at the last chunk, of this or a later segment, whose effect on the
    segment is not negligible.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stages: gl.constexpr = NUM_STAGES
    i_s, i_hv, i_n, begin, length, start = locate_segment(
        gl.program_id(0), order, T, N, HV, segment, cu_seqlens, PACKED, ORDERED, 4
    )
    # an empty sequence also has one segment, whose program copies the final state's gradient to the initial state's
    if (start >= length) & (start > 0):
        return
    slot = hopper.first_chunk(i_n, begin, T, BT, PACKED)
    # the offset is clamped, because an empty sequence may begin past the last token
    p_gates = gates + (i_hv.to(gl.int64) * tokens + gl.minimum(begin, tokens - 1)) * 4
    chunks, first = gl.cdiv(length, BT), start // BT
    end = gl.minimum(chunks, first + segment // BT)
    located = Chunks(first, end, chunks)
    started = reverse_scan_start(
        p_gates, Factors(None, slot, i_hv, HV), located, segment, length, line, True, False, passed is not None
    )
    o_state = (i_n.to(gl.int64) * HV + i_hv) * D * D
    p_initial, known, wanted = hopper.pointer_or(passed, gates) + ((i_s + 1).to(gl.int64) * HV + i_hv) * D * D, 0, 0
    if passed is not None and (started == end) & (end < chunks):
        known = D
    if dfinal_state is not None and started == chunks:
        p_initial = dfinal_state + o_state
        known = D
    if dinitial_state is not None and first == 0:
        wanted = D

    q_s = gl.allocate_shared_memory(dtype, [stages, BT, D], shared)
    k_s = gl.allocate_shared_memory(dtype, [stages, BT, D], shared)
    do_s = gl.allocate_shared_memory(dtype, [stages, BT, D], shared)
    s_a = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    r_1 = gl.allocate_shared_memory(dtype, [1, BT, D], shared)
    s_1 = gl.allocate_shared_memory(dtype, [1, D, D], shared)
    ds_1 = gl.allocate_shared_memory(dtype, [1, D, D], shared)
    dy_1 = gl.allocate_shared_memory(dtype, [1, BT, D], shared)
    # first half: E. Second half: dQ until it is stored to global memory, then F. At the end both halves hold dK until
    # it is stored
    ef_1 = gl.allocate_shared_memory(dtype, [1, BT, D], shared)
    # rows per stage: cumulative decays b, β r, r (inverse norms of k), and inverse norms of q
    gates_s = gl.allocate_shared_memory(gl.float32, [stages * 4, BT], vector)
    s_ends = gl.allocate_shared_memory(gl.float32, [64], vector)
    s_db = gl.allocate_shared_memory(gl.float32, [BT], vector)
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    initialise_barriers(barriers)

    token = gl.maximum(started - 1, 0) * BT
    steps, warm, rows = started - first, started - end, length - token
    at = begin + token
    o_qk, o_t = (at * H + i_hv // (HV // H)) * D, at * HV + i_hv
    o_vo, o_s = o_t * D, ((slot + token // BT) * HV + i_hv) * D * D
    p_gates += token.to(gl.int64) * 4
    inputs = (q + o_qk, k + o_qk, do + o_vo, inverse + o_t * BT, residual + o_vo, states + o_s, p_gates)
    ends = (p_initial, hopper.pointer_or(dinitial_state, gates) + o_state, dv + o_vo)
    outputs = (g + o_t, dq + o_vo, dk + o_vo, dg + o_t, dbeta + o_t)
    chunk, read, chain = (q_s, k_s, do_s, gates_s), (s_a, s_1, r_1), (ds_1, dy_1, s_p, s_ends)
    span = Span(rows, steps, warm, known, wanted)
    sums = (r_1, s_1, ds_1, dy_1, ef_1, s_ends, s_db)
    # registers per thread of the four warpgroups, together at most 512: the epilogue gets 512 − 144 − 152 − 32
    gl.warp_specialize(
        [
            (epilogue, (outputs, sums, chunk, barriers, scale, rows, steps, warm, HV)),
            (reverse_scan, (ends, read, chunk, chain, barriers, scale, span, HV, 0)),
            (reverse_scan, (ends, read, chunk, chain, barriers, scale, span, HV, 64)),
            (producer, (inputs, read, chunk, barriers, rows, steps, warm, H, HV)),
        ],
        [4, 4, 4], [144, 152, 32],
    )  # fmt: skip


def backward(reverse: Reverse, grads: Gradients) -> None:
    """Write all gradients into `grads`, with dq and dk of each value head. Requires `qk_l2norm`.

    Sequences are cut into segments of `reverse.segment` tokens, as in `backward_state`.
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
