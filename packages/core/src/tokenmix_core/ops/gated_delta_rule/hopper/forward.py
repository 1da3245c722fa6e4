"""Forward on Hopper, warp-specialised: one program per segment and value head of 128, or 64 of its columns.

    producer    k v Ã q ─ cp.async, NUM_STAGES ─► smem;  gates ─► smem                      arrive full, wait empty
                   │ full                          ▲ empty
    scan        S ─► R = Ã (V − γ K S) ─► S' = 2^b S + Kᵀ(…R)    64 columns of S per warpgroup, S in registers
      1 or 2       │ S, R ─► smem, 1 stage                       arrive states[0], residuals[0]; wait [1]
    epilogue    P' from Q Kᵀ ─► O = γ Q S + P' R ─► o; or S, R ─► saved for the backward pass
                                                                 wait states[0], residuals[0]; arrive [1], empty

Warpgroups synchronise at mbarriers only, so work that the chain from S to S' does not wait for runs in parallel to it.
If there are few heads, a program computes 64 columns of V and has one warpgroup that scans. R are the residuals, P' the
scores with decay and β (README.md).
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.hopper.forward_types import Barriers, Options, Pipeline, Results, Span, Tiles
from tokenmix_core.ops.gated_delta_rule.hopper.gates import load_gate, load_last
from tokenmix_core.ops.gated_delta_rule.hopper.segments import Factors, locate_segment, locate_state, scan_start
from tokenmix_core.ops.gated_delta_rule.types import Inputs, Saved, Terms, state_arguments
from tokenmix_core.ops.slots import Pool

# pipeline stages of a chunk's inputs
NUM_STAGES = gl.constexpr(2)


@gluon.jit
def producer(
    pointers, tiles, pipeline, rows, chunks, H: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, QUERIES: gl.constexpr,
    WRITES: gl.constexpr,
):  # fmt: skip
    """Load each chunk's tiles by cp.async into the next stage once it is empty, and store the chunk's gates there.

    QUERIES: whether to load Q, which only outputs need; WRITES: whether a write factor multiplies a gate.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    p_q, p_k, p_v, p_a, p_gates, p_w = pointers
    q_s, k_s, v_s, a_s, gates_s = tiles
    full, empty = pipeline.full, pipeline.empty
    # strides are constexprs: as run-time values they would need more registers than this warpgroup is given
    s_qk: gl.constexpr = H * k_s.shape[2]
    s_vo: gl.constexpr = HV * V
    s_at: gl.constexpr = HV * a_s.shape[2]
    for i in range(chunks):
        stage = i % NUM_STAGES
        b_b, b_w = load_gate(p_gates, rows, line), load_gate(p_gates + 1, rows, line)
        b_r, last = load_gate(p_gates + 2, rows, line), load_last(p_gates, rows)
        factor = 1.0
        if WRITES:
            factor = gl.load(p_w)
            p_w += HV
        mbarrier.wait(empty.index(stage), hopper.empty_parity(i, NUM_STAGES))
        hopper.async_copy_rows(k_s.index(stage), p_k, s_qk, rows, 4)
        hopper.async_copy_rows(v_s.index(stage), p_v, s_vo, rows, 4)
        hopper.async_copy_rows(a_s.index(stage), p_a, s_at, rows, 4)
        if QUERIES:
            hopper.async_copy_rows(q_s.index(stage), p_q, s_qk, rows, 4)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        gates_s.index(stage * 4).store(b_b)
        gates_s.index(stage * 4 + 1).store(b_w)
        gates_s.index(stage * 4 + 2).store(-gl.exp2(b_b) * b_r)
        gates_s.index(stage * 4 + 3).store(b_w * gl.exp2(last - b_b) * factor)
        mbarrier.arrive(full.index(stage))
        p_q += 64 * s_qk
        p_k += 64 * s_qk
        p_v += 64 * s_vo
        p_a += 64 * s_at
        p_gates += 64 * 4
        rows -= 64


@gluon.jit
def scan_states(
    pointers, tiles, results, barriers, rows, chunks, known, wanted, FIRST: gl.constexpr, V: gl.constexpr,
    FINAL_V: gl.constexpr,
):  # fmt: skip
    """Scan 64 columns of S over the chunks; S is transposed, so that matrices computed from it are register operands.

    S is loaded from `p_initial` if `known` is V, and starts at zero if `known` is 0. S after the last chunk is stored
    if `wanted` is V. FIRST is the first of the columns. With slots, `pointers` has a fourth element; if it is positive,
    S is loaded from `p_final`. Rows at `p_final` are FINAL_V elements apart.
    """
    p_initial, p_final, p_gates = pointers[0], pointers[1], pointers[2]
    k_s, v_s, a_s, gates_s = tiles.k, tiles.v, tiles.a, tiles.gates
    full, empty, states, residuals = barriers
    dtype: gl.constexpr = k_s.dtype
    BT: gl.constexpr = k_s.shape[1]
    K: gl.constexpr = k_s.shape[2]
    tile: gl.constexpr = hopper.mma_layout(K, 4)
    flat: gl.constexpr = hopper.mma_layout(BT, 4)
    col: gl.constexpr = gl.SliceLayout(0, flat)
    left: gl.constexpr = gl.DotOperandLayout(0, flat, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    s_s = results.s.slice(FIRST, 64, 1).permute((1, 0))
    s_r = results.r.slice(FIRST, 64, 1).permute((1, 0))
    o_v, o_k = FIRST + gl.arange(0, 64, gl.SliceLayout(1, tile)), gl.arange(0, K, gl.SliceLayout(0, tile))
    p_tile = o_k[None, :] * V + o_v[:, None]
    b_s = gl.load(p_initial + p_tile, mask=o_v[:, None] < known, other=0.0)
    p_tile = o_k[None, :] * FINAL_V + o_v[:, None]
    if len(pointers) > 3:  # noqa: SIM102
        # a branch, because the registers do not hold two loads of S
        if pointers[3] > 0:
            b_s = gl.load(p_final + p_tile).to(gl.float32)
    zero = gl.zeros([64, BT], gl.float32, flat)
    last = load_last(p_gates, rows)
    for i in range(chunks):
        stage = i % NUM_STAGES
        s_k, s_a, s_v = k_s.index(stage), a_s.index(stage).permute((1, 0)), v_s.index(stage).slice(FIRST, 64, 1)
        s_y, s_w = gates_s.index(stage * 4 + 2), gates_s.index(stage * 4 + 3)
        decay = gl.exp2(last)
        b_h = b_s.to(dtype)
        mbarrier.wait(full.index(stage), hopper.parity(i, NUM_STAGES))
        fence_async_shared()
        # R = Ã (V − γ ⊙ K S), γ = 2^b; during the MMA S is stored for the epilogue
        b_y = warpgroup_mma(gl.convert_layout(b_h, left_k), s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(states.index(1), hopper.empty_parity(i, 1))
        s_s.store(b_h)
        fence_async_shared()
        mbarrier.arrive(states.index(0))
        rows -= BT
        p_gates += BT * 4
        if rows > 0:
            last = load_last(p_gates, rows)
        b_v = s_v.permute((1, 0)).load(flat).to(gl.float32)
        b_y = warpgroup_mma_wait(0, deps=[b_y])
        b_y = gl.convert_layout((b_v + b_y * s_y.load(col)[None, :]).to(dtype), left)
        b_r = warpgroup_mma(b_y, s_a, zero, use_acc=False, is_async=True)
        b_s *= decay
        b_r, b_y = warpgroup_mma_wait(0, deps=[b_r, b_y])
        # S ← 2^b_last S + Kᵀ (2^(b_last − b) β ⊙ R); during the MMA the residuals R are stored for the epilogue
        b_u = gl.convert_layout((b_r * s_w.load(col)[None, :]).to(dtype), left)
        b_s = warpgroup_mma(b_u, s_k, b_s, is_async=True)
        mbarrier.wait(residuals.index(1), hopper.empty_parity(i, 1))
        s_r.store(b_r.to(dtype))
        fence_async_shared()
        mbarrier.arrive(residuals.index(0))
        b_s, b_u = warpgroup_mma_wait(0, deps=[b_s, b_u])
        mbarrier.arrive(empty.index(stage))
    gl.store(p_final + p_tile, b_s.to(p_final.dtype.element_ty), mask=o_v[:, None] < wanted)


@gluon.jit
def write_outputs(pointers, tiles, results, barriers, s_o, scale, span, HV: gl.constexpr, V: gl.constexpr, options):
    """Compute and store O = n ⊙ (γ ⊙ Q S + P' R), P' = tril(Q Kᵀ ⊙ Γ) diag(β), for each chunk.

    S: state before the chunk; R: residuals of its tokens; γ, Γ: decays (all as in README.md). n is the scale. With
    `options.l2norm`, n is divided by the norms of Q's rows, computed from diag(Q Qᵀ), and β by the norms of K's rows
    (the stored gate β r). With `options.save` also store S and R of each chunk. Nothing is stored for the first
    `before` chunks of `span`.
    """
    L2NORM: gl.constexpr = options.l2norm
    SAVE: gl.constexpr = options.save
    p_o, p_r, p_s = pointers
    rows, before, chunks = span
    q_s, k_s, gates_s = tiles.q, tiles.k, tiles.gates
    s_s, s_r = results
    full, empty, states, residuals = barriers
    dtype: gl.constexpr = k_s.dtype
    BT: gl.constexpr = k_s.shape[1]
    square: gl.constexpr = hopper.mma_layout(BT, 4)
    BV: gl.constexpr = s_s.shape[1]
    tile: gl.constexpr = hopper.mma_layout(BV, 4)
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    row_o: gl.constexpr = gl.SliceLayout(1, tile)
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    zero, zero_o = gl.zeros([BT, BT], gl.float32, square), gl.zeros([BT, BV], gl.float32, tile)
    for i in range(chunks):
        stage = i % NUM_STAGES
        s_q, s_k, s_b, s_w = q_s.index(stage), k_s.index(stage), gates_s.index(stage * 4), gates_s.index(stage * 4 + 1)
        mbarrier.wait(full.index(stage), hopper.parity(i, NUM_STAGES))
        fence_async_shared()
        b_p = warpgroup_mma(s_q, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_i = s_b.load(row)
        b_decay = hopper.causal_decay(b_i, s_b.load(col), o_i, o_j) * s_w.load(col)[None, :]
        if L2NORM:
            b_n = warpgroup_mma(s_q, s_q.permute((1, 0)), zero, use_acc=False, is_async=True)
            b_p = warpgroup_mma_wait(1, deps=[b_p])
            b_p *= b_decay
            b_n = warpgroup_mma_wait(0, deps=[b_n])
            b_n = gl.rsqrt(gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_n, 0.0), 1) + 1e-6) * scale
        else:
            b_p = warpgroup_mma_wait(0, deps=[b_p])
            b_p *= b_decay
            b_n = gl.full([BT], scale, gl.float32, row)
        b_p = gl.convert_layout((b_p * b_n[:, None]).to(dtype), gl.DotOperandLayout(0, tile, 2))
        b_g = gl.convert_layout(b_n * gl.exp2(b_i), row_o)
        mbarrier.wait(states.index(0), hopper.parity(i, 1))
        b_o = warpgroup_mma(s_q, s_s, zero_o, use_acc=False, is_async=True)
        if SAVE:
            hopper.store_rows(p_s, s_s, V, gl.where(i < before, 0, s_s.shape[0]), 4)
        b_o = warpgroup_mma_wait(0, deps=[b_o])
        mbarrier.arrive(states.index(1))
        mbarrier.arrive(empty.index(stage))
        b_o *= b_g[:, None]
        mbarrier.wait(residuals.index(0), hopper.parity(i, 1))
        b_o = warpgroup_mma(b_p, s_r, b_o, is_async=True)
        if SAVE:
            hopper.store_rows(p_r, s_r, HV * V, gl.where(i < before, 0, rows), 4)
        b_o, b_p = warpgroup_mma_wait(0, deps=[b_o, b_p])
        mbarrier.arrive(residuals.index(1))
        s_o.store(b_o.to(dtype))
        hopper.store_rows(p_o, s_o, HV * V, gl.where(i < before, 0, rows), 4)
        p_o += BT * HV * V
        p_r += BT * HV * V
        p_s += HV * s_s.shape[0] * V
        rows -= BT


@gluon.jit
def save_states(pointers, results, barriers, span, HV: gl.constexpr, V: gl.constexpr):
    """Store S and R of each chunk of the segment in global memory, without computing outputs."""
    _, p_r, p_s = pointers
    rows, before, chunks = span
    s_s, s_r = results
    _, _, states, residuals = barriers
    for i in range(chunks):
        mbarrier.wait(states.index(0), hopper.parity(i, 1))
        hopper.store_rows(p_s, s_s, V, gl.where(i < before, 0, s_s.shape[0]), 4)
        mbarrier.arrive(states.index(1))
        mbarrier.wait(residuals.index(0), hopper.parity(i, 1))
        hopper.store_rows(p_r, s_r, HV * V, gl.where(i < before, 0, rows), 4)
        mbarrier.arrive(residuals.index(1))
        p_s += HV * s_s.shape[0] * V
        p_r += 64 * HV * V
        rows -= 64


@gluon.jit
def epilogue(pointers, tiles, results, barriers, s_o, scale, span, HV: gl.constexpr, V: gl.constexpr, options):
    """Write outputs if `options.output`, and the states S and residuals R for the backward pass if `options.save`."""
    if options.output:
        write_outputs(pointers, tiles, results, barriers, s_o, scale, span, HV, V, options)
    else:
        save_states(pointers, results, barriers, span, HV, V)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "tokens", "segment"])
def forward_kernel(
    q, k, v, inverse, gates, writes, entering, initial_state, cu_seqlens, order, o, final_state, residual, states,
    slots, fresh, stride_state, scale, T, N, tokens, segment,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr,
    L2NORM: gl.constexpr, PACKED: gl.constexpr, ORDERED: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Compute outputs and final states (if `o` is given); store R and the chunks' entering states (if `residual` is).

    A program computes BV columns of V of a segment and value head. ORDERED: programs take segments in the order of
    `order`. `writes` has one factor per chunk. `slots` and PARTS are as in the Triton kernel of `../forward.py`.
    """
    OUTPUT: gl.constexpr = o is not None
    SAVE: gl.constexpr = residual is not None
    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stages: gl.constexpr = NUM_STAGES
    q_s = gl.allocate_shared_memory(dtype, [stages, BT, K], shared)
    k_s = gl.allocate_shared_memory(dtype, [stages, BT, K], shared)
    v_s = gl.allocate_shared_memory(dtype, [stages, BT, BV], shared)
    a_s = gl.allocate_shared_memory(dtype, [stages, BT, BT], shared)
    # rows per stage: b (cumulative decays), β r, −γ r and 2^(b_last − b) β r; r: inverse norms of the keys, γ = 2^b
    gates_s = gl.allocate_shared_memory(gl.float32, [stages * 4, BT], vector)
    s_s = gl.allocate_shared_memory(dtype, [K, BV], shared)
    s_r = gl.allocate_shared_memory(dtype, [BT, BV], shared)
    s_o = gl.allocate_shared_memory(dtype, [BT, BV], shared)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    states_2 = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    residuals_2 = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    warpgroups: gl.constexpr = BV // 64
    for i in gl.static_range(stages):
        # arrivals at a full barrier: the cp.async of 128 threads, and one arrival for the gates
        mbarrier.init(full.index(i), 129)
        mbarrier.init(empty.index(i), warpgroups + 1 if OUTPUT else warpgroups)
    mbarrier.init(states_2.index(0), warpgroups)
    mbarrier.init(states_2.index(1), 1)
    mbarrier.init(residuals_2.index(0), warpgroups)
    mbarrier.init(residuals_2.index(1), 1)

    gdc_wait()
    i_v, i_sh = gl.program_id(0) % (V // BV), gl.program_id(0) // (V // BV)
    located = locate_segment(i_sh, order, T, N, HV, segment, cu_seqlens, PACKED, ORDERED, 4)
    i_s, i_hv, i_n, begin, length, first = located
    # an empty sequence also has one segment, whose program copies the initial state to the final state
    if (first >= length) & (first > 0):
        return
    slot = hopper.first_chunk(i_n, begin, T, BT, PACKED)
    begun = scan_start(gates, Factors(writes, slot, i_hv, HV), located, tokens, segment, L2NORM, 4)
    token = begin + begun
    o_qk, o_vo = (token * H + i_hv // (HV // H)) * K, (token * HV + i_hv) * V + i_v * BV
    # the offset is clamped, because an empty sequence may begin past the last token
    p_gates = gates + (i_hv.to(gl.int64) * tokens + gl.minimum(token, tokens - 1)) * 4
    slot += begun // BT

    rows, end = length - begun, gl.minimum(first + segment, length)
    # chunks before the segment are scanned, but their results are not stored
    chunks, before = gl.cdiv(end - begun, BT), (first - begun) // BT
    span = Span(rows, before, chunks)
    o_state = (i_n.to(gl.int64) * HV + i_hv) * K * V + i_v * BV
    p_initial, known = hopper.pointer_or(entering, gates) + (i_s.to(gl.int64) * HV + i_hv) * K * V + i_v * BV, V
    if slots is not None:
        o_pool, reads, keeps = locate_state(i_n, i_hv, slots, fresh, stride_state, K, V, PARTS)
        o_state = o_pool + i_v * BV
        held = gl.where(reads & (length <= segment), V, 0)
        known = gl.where(length > segment, V, 0)
    elif first == 0:
        p_initial = hopper.pointer_or(initial_state, gates) + o_state
        known = V if initial_state is not None else 0
    if begun < first:
        known = 0
    wanted = 0
    if OUTPUT & (end >= length):
        wanted = V if slots is None else gl.where(keeps, V, 0)
    tiles, results = Tiles(q_s, k_s, v_s, a_s, gates_s), Results(s_s, s_r)
    pipeline, barriers = Pipeline(full, empty), Barriers(full, empty, states_2, residuals_2)
    p_w = p_gates
    if writes is not None:
        p_w = writes + slot.to(gl.int64) * HV + i_hv
    inputs = (q + o_qk, k + o_qk, v + o_vo, inverse + (token * HV + i_hv) * BT, p_gates, p_w)
    ends = (p_initial, hopper.pointer_or(final_state, gates) + o_state, p_gates)
    if slots is not None:
        ends = (p_initial, final_state + o_state, p_gates, held)
    o_s = (slot * HV + i_hv) * K * V + i_v * BV
    outputs = (
        hopper.pointer_or(o, v) + o_vo,
        hopper.pointer_or(residual, v) + o_vo,
        hopper.pointer_or(states, v) + o_s,
    )
    # registers per thread, summed over warpgroups: 512 for four warpgroups, 504 for three; the first scanning warpgroup
    # gets what the others leave
    if warpgroups == 2:
        gl.warp_specialize(
            [
                (scan_states, (ends, tiles, results, barriers, rows, chunks, known, wanted, 0, V, V * PARTS)),
                (scan_states, (ends, tiles, results, barriers, rows, chunks, known, wanted, 64, V, V * PARTS)),
                (epilogue, (outputs, tiles, results, barriers, s_o, scale, span, HV, V, Options(L2NORM, OUTPUT, SAVE))),
                (producer, (inputs, tiles, pipeline, rows, chunks, H, HV, V, OUTPUT, writes is not None)),
            ],
            [4, 4, 4], [160, 136, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (scan_states, (ends, tiles, results, barriers, rows, chunks, known, wanted, 0, V, V * PARTS)),
                (epilogue, (outputs, tiles, results, barriers, s_o, scale, span, HV, V, Options(L2NORM, OUTPUT, SAVE))),
                (producer, (inputs, tiles, pipeline, rows, chunks, H, HV, V, OUTPUT, writes is not None)),
            ],
            [4, 4], [200, 96],
        )  # fmt: skip


def forward(
    x: Inputs,
    terms: Terms,
    *,
    order: Tensor | None,
    segment: int,
    o: Tensor | None,
    final_state: Tensor | None,
    saved: Saved | None,
    pool: Pool | None = None,
) -> None:
    """Write outputs to `o`, final states to `final_state` or `pool`, residuals and chunk states to `saved`, if given.

    A segment has `segment` tokens; 0 stands for whole sequences. `x.writes` has one factor per chunk.
    """
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    # for whole sequences, use segments at least as long as any sequence
    segment = segment or (T // CHUNK + 1) * CHUNK
    programs = chunk_slots(B, T, segment, x.cu_seqlens) * HV
    BV = tuning.forward_columns(programs, V)
    residual, states, _ = saved or (None, None, None)
    forward_kernel[(programs * (V // BV),)](
        q=x.q, k=x.k, v=x.v, inverse=terms.inverse, gates=terms.gates, writes=x.writes, entering=terms.entering,
        **state_arguments(x, final_state, pool), cu_seqlens=x.cu_seqlens, order=order, o=o,
        residual=residual, states=states, scale=x.scale, T=T, N=num_sequences(x.q, x.cu_seqlens), tokens=B * T,
        segment=segment, H=H, HV=HV, K=K, V=V, BT=CHUNK, BV=BV, L2NORM=x.qk_l2norm, PACKED=x.cu_seqlens is not None,
        ORDERED=order is not None, num_warps=4, launch_pdl=True,
    )  # fmt: skip
