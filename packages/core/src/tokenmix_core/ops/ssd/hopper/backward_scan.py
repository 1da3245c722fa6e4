"""SSD backward on Hopper as a reverse scan: one program per head and sequence or segment.

D, the gradient of the state after a chunk, stays in registers and shared memory:

    chunks, last to first:
    q k v dO ─ cp.async, 2 stages ─┐
    S ─ cp.async, 1 stage ─────────┴ wait ─► Q Kᵀ, dO Vᵀ, dO Sᵀ, K D ─► P, dP ─► dQ, dV, dK, D ← e^b_C D + Qᵀ dO
          ▲                                        │                                        │
          └─ prefetch of the chunk before ─────────┤        dq dk dv of this chunk stay in their stage's buffers
             store of the chunk after ◄────────────┘        and are stored during the next chunk's MMAs

P, dP and b are those of README.md; S is the state before the chunk. The gradients of Δ (v enters the state as Δ v) and
of the skip weight (w in o = … + w v) are summed from results of the same MMAs.
"""

from collections import namedtuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.ssd.hopper.forward import locate_span
from tokenmix_core.ops.ssd.hopper.intra_chunk import PathSums, intra_chunk_gradients
from tokenmix_core.ops.ssd.hopper.smem_vectors import (
    allocate_parts,
    allocate_vectors,
    as_matrix,
    column,
    gather,
    head_rows,
    load_vectors,
    multiply,
    store_decay_gradients,
    store_decays,
    store_row_sums,
)
from tokenmix_core.ops.ssd.types import Gradients, Inputs


@gluon.constexpr_function
def state_layout(K, V, warps):
    """Return the layout of an accumulator `[K, V]`: 16 rows per warp; warps beyond K / 16 split the columns."""
    return gl.NVMMADistributedLayout([3, 0], [K // 16, warps * 16 // K], [16, V * K // (16 * warps), 16])


# pointers to a head's rows, and the strides between tokens
Rows = namedtuple("Rows", "q k v do stride_q stride_k stride_v stride_do")
# shared memory of two pipeline stages for the rows of each tensor
Stages = namedtuple("Stages", "q k v do")
# pointers to the gradients of q, k, v and g: the starts of the whole tensors
Gradient = namedtuple("Gradient", "q k v g")


@gluon.jit
def prefetch_chunk(stages, stage, p, o_t, rows):
    """Issue cp.async of the rows of one chunk, which starts at row `o_t`, to the buffers of a stage."""
    W: gl.constexpr = gl.num_warps()
    o_t = o_t.to(gl.int64)
    hopper.async_copy_rows(stages.q.index(stage), p.q + o_t * p.stride_q, p.stride_q, rows, W, True)
    hopper.async_copy_rows(stages.k.index(stage), p.k + o_t * p.stride_k, p.stride_k, rows, W, True)
    hopper.async_copy_rows(stages.v.index(stage), p.v + o_t * p.stride_v, p.stride_v, rows, W, True)
    hopper.async_copy_rows(stages.do.index(stage), p.do + o_t * p.stride_do, p.stride_do, rows, W, True)


@gluon.jit
def store_chunk(d, stages, stage, crossing_h, later_h, o_out, HV, rows):
    """Store a chunk's gradients in global memory; dq, dk and dv are in the stage's buffers of q, k and v.

    `o_out` is the index of the chunk's first token and head in `[B · T, HV]`. `crossing_h` and `later_h` are the
    vectors that `store_decay_gradients` adds up to dg.
    """
    W: gl.constexpr = gl.num_warps()
    K: gl.constexpr = stages.q.shape[2]
    V: gl.constexpr = stages.v.shape[2]
    hopper.store_rows(d.q + o_out * K, stages.q.index(stage), HV * K, rows, W, True)
    hopper.store_rows(d.k + o_out * K, stages.k.index(stage), HV * K, rows, W, True)
    hopper.store_rows(d.v + o_out * V, stages.v.index(stage), HV * V, rows, W, True)
    store_decay_gradients(d.g + o_out, HV, rows, crossing_h, later_h)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def backward_scan_kernel(
    q, k, v, do, g, dt, skip, states, dleaving, dq, dk, dv, dg, ddt, dskip, dinitial_state, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV, segment,
    K: gl.constexpr, V: gl.constexpr, SEGMENTED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute all gradients of a sequence or (SEGMENTED) segment of `segment` tokens of one head.

    Names that end in `_h` are vectors in shared memory; strides are in units of 16 bytes.
    """
    BT: gl.constexpr = 64
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = q.dtype.element_ty
    tile: gl.constexpr = state_layout(K, V, W)
    left: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    wide: gl.constexpr = hopper.mma_layout_split_n(K, W)
    narrow: gl.constexpr = hopper.mma_layout_split_n(V, W)
    by_head: gl.constexpr = head_rows(W)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    i_h, i_s = gl.program_id(0) % HV, gl.program_id(0) // HV
    begin, length, i_c = locate_span(i_s, T, N, segment, cu_seqlens, SEGMENTED, PACKED)
    if SEGMENTED and length <= 0:
        return
    # strides come in units of 8 elements, which tells the compiler that rows are 16-byte aligned
    stride_q, stride_k, stride_v, stride_do = stride_q * 8, stride_k * 8, stride_v * 8, stride_do * 8
    i_g, o_h = i_h // (HV // G), begin * HV + i_h
    p_q, p_k = q + begin * stride_q + i_g * K, k + begin * stride_k + i_g * K
    p_v, p_do = v + begin * stride_v + i_h * V, do + begin * stride_do + i_h * V
    p_s = states + (i_c * HV + i_h) * K * V

    q_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    k_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    do_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    stages = Stages(q_2, k_2, v_2, do_2)
    pointers = Rows(p_q, p_k, p_v, p_do, stride_q, stride_k, stride_v, stride_do)
    results = Gradient(dq, dk, dv, dg)
    s_s = gl.allocate_shared_memory(dtype, [K, V], shared)
    s_d = gl.allocate_shared_memory(dtype, [K, V], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_dp = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    b_h, from_h, to_h = allocate_vectors(2, BT), allocate_vectors(2, BT), allocate_vectors(2, BT)
    row_h, query_h, key_h = allocate_parts(1, W // 4), allocate_parts(1, W // 4), allocate_parts(1, W // 4)
    own_h, skip_h, column_h = allocate_parts(1, W // 4), allocate_parts(1, W // 4), allocate_parts(1, 4)
    sums = PathSums(row_h, column_h, own_h, skip_h)
    end_h, crossing_h, later_h = allocate_vectors(1, K), allocate_vectors(1, BT), allocate_vectors(1, BT)

    i_t = gl.maximum(gl.cdiv(length, BT) - 1, 0)
    rows, o_t = length - i_t * BT, (i_t * BT).to(gl.int64)
    prefetch_chunk(stages, 0, pointers, o_t, rows)
    hopper.async_copy_rows(s_s, p_s + i_t.to(gl.int64) * HV * K * V, V, K, W)
    async_copy.commit_group()
    b_g = load_vectors(g + o_h + o_t * HV, HV, rows, 1)
    total, b_to = store_decays(b_h.index(0), from_h.index(0), to_h.index(0), b_g, scale)
    # enter_h: Δ e^(b_C − b), a token's weight in the state at the chunk's end
    dt_h, enter_h = None, to_h
    if dt is not None:
        dt_h, enter_h = allocate_vectors(2, BT), allocate_vectors(2, BT)
        b_dt = load_vectors(dt + o_h + o_t * HV, HV, rows, 1)
        as_matrix(dt_h.index(0), 1, BT).store(b_dt)
        as_matrix(enter_h.index(0), 1, BT).store(b_dt * b_to)
    b_skip = None
    if skip is not None:
        b_skip = gl.load(skip + i_h).to(gl.float32)
        skipped = gl.zeros([1, BT], gl.float32, by_head)
    o_k, o_v = gl.arange(0, K, gl.SliceLayout(1, tile)), gl.arange(0, V, gl.SliceLayout(0, tile))
    o_state = (i_s.to(gl.int64) * HV + i_h) * K * V
    if dleaving is not None:
        b_d = gl.load(dleaving + o_state + o_k[:, None] * V + o_v[None, :])
    else:
        b_d = gl.zeros([K, V], gl.float32, tile)
    s_d.store(b_d.to(dtype))
    o_1 = gl.arange(0, BT, gl.SliceLayout(0, by_head))[None, :]
    for i in range(gl.cdiv(length, BT)):
        stage, next_stage = i % 2, (i + 1) % 2
        s_q, s_k, s_v, s_do = q_2.index(stage), k_2.index(stage), v_2.index(stage), do_2.index(stage)
        token = (gl.cdiv(length, BT) - 1 - i) * BT
        rows, o_t = length - token, (gl.maximum(token - BT, 0)).to(gl.int64)
        hopper.wait_async_copies(0)
        b_qk, b_dp = multiply(s_q, s_k.permute((1, 0)), BT), multiply(s_do, s_v.permute((1, 0)), BT)
        b_dq, b_kd = multiply(s_do, s_s.permute((1, 0)), K), multiply(s_k, s_d, V)
        # during these MMAs, store the gradients of the chunk that was scanned before, which is the next chunk in time
        if i > 0:
            o_out = (begin + token + BT) * HV + i_h
            store_chunk(results, stages, next_stage, crossing_h, later_h, o_out, HV, rows - BT)
        if token > 0:
            prefetch_chunk(stages, next_stage, pointers, o_t, BT)
            async_copy.commit_group()
        b_g = load_vectors(g + o_h + o_t * HV, HV, gl.minimum(token, BT), 1)
        if dt is not None:
            b_dt = load_vectors(dt + o_h + o_t * HV, HV, gl.minimum(token, BT), 1)
        end_h.index(0).store(gl.sum(b_d * s_s.load(tile).to(gl.float32), 1))
        b_qk, b_dp = warpgroup_mma_wait(2, deps=[b_qk, b_dp])
        b_p, b_dp = intra_chunk_gradients(
            b_qk, b_dp, b_h.index(stage), None if dt_h is None else dt_h.index(stage), b_skip,
            sums, 0, scale,
        )  # fmt: skip
        s_p.store(b_p.to(dtype))
        s_dp.store(b_dp.to(dtype))
        b_dq, b_kd = warpgroup_mma_wait(0, deps=[b_dq, b_kd])
        store_row_sums(query_h, 0, b_dq * s_q.load(wide).to(gl.float32))
        store_row_sums(key_h, 0, b_kd * s_v.load(narrow).to(gl.float32))
        b_dk = multiply(s_v, s_d.permute((1, 0)), K)
        b_dq *= column(from_h, stage, wide)
        b_dv = b_kd * column(enter_h, stage, narrow)
        to_dk = column(enter_h, stage, wide)
        from_j = from_h.index(stage).load(gl.SliceLayout(0, left))[None, :]
        b_q = (s_q.permute((1, 0)).load(left).to(gl.float32) * from_j).to(dtype)
        b_d *= gl.exp2(gl.sum(total, 0))
        b_dk = warpgroup_mma_wait(0, deps=[b_dk])
        b_dk *= to_dk
        fence_async_shared()
        hopper.barrier()
        if token > 0:
            hopper.async_copy_rows(s_s, p_s + (token // BT - 1).to(gl.int64) * HV * K * V, V, K, W, True)
            async_copy.commit_group()

        # dQ += dP K; dV += Pᵀ dO; dK += dPᵀ Q; the state's gradient D ← e^b_C D + Qᵀ (scale e^b dO)
        b_dq = warpgroup_mma(s_dp, s_k, b_dq, is_async=True)
        b_dv = warpgroup_mma(s_p.permute((1, 0)), s_do, b_dv, is_async=True)
        b_dk = warpgroup_mma(s_dp.permute((1, 0)), s_q, b_dk, is_async=True)
        b_d = warpgroup_mma(b_q, s_do, b_d, is_async=True)
        b_dq, b_dv, b_dk, b_d, b_q = warpgroup_mma_wait(0, deps=[b_dq, b_dv, b_dk, b_d, b_q])
        hopper.barrier()
        s_q.store(b_dq.to(dtype))
        s_k.store(b_dk.to(dtype))
        s_v.store(b_dv.to(dtype))
        s_d.store(b_d.to(dtype))
        b_column, b_later = gather(column_h), gather(key_h) * as_matrix(to_h.index(stage), 1, BT).load(by_head)
        b_query = gather(query_h) * as_matrix(from_h.index(stage), 1, BT).load(by_head)
        if dt is not None:
            p_ddt = ddt + o_h + (token + o_1).to(gl.int64) * HV
            gl.store(p_ddt, b_column + b_later + gather(own_h), mask=o_1 < rows)
            b_delta = as_matrix(dt_h.index(stage), 1, BT).load(by_head)  # type: ignore[union-attr]
            b_column, b_later = b_column * b_delta, b_later * b_delta
        # b_end: gradient through the state that passes the whole chunk, which all of the chunk's decays scale. It is
        # added at the last token; the reverse sum then adds it to the gradients of all other decays
        b_end = gl.exp2(total) * gl.sum(as_matrix(end_h, 1, K).load(by_head), 1)
        b_crossing = gather(row_h) - b_column + b_query + gl.where(o_1 == BT - 1, b_end[:, None], 0.0)
        as_matrix(crossing_h, 1, BT).store(b_crossing)
        as_matrix(later_h, 1, BT).store(b_later)
        if skip is not None:
            skipped += gather(skip_h)
        total, b_to = store_decays(b_h.index(next_stage), from_h.index(next_stage), to_h.index(next_stage), b_g, scale)
        if dt is not None:
            as_matrix(dt_h.index(next_stage), 1, BT).store(b_dt)  # type: ignore[union-attr]
            as_matrix(enter_h.index(next_stage), 1, BT).store(b_dt * b_to)
    hopper.wait_async_copies(0)
    last = (gl.cdiv(length, BT) + 1) % 2
    if length > 0:
        store_chunk(results, stages, last, crossing_h, later_h, o_h, HV, length)
    if dinitial_state is not None:
        gl.store(dinitial_state + o_state + hopper.opaque(o_k)[:, None] * V + o_v[None, :], b_d)
    if skip is not None:
        gl.store(dskip + i_s * HV + i_h, gl.sum(gl.sum(skipped, 1), 0))


def hopper_backward_scan(x: Inputs, *, do: Tensor, states: Tensor, dleaving: Tensor | None, segment: int) -> Gradients:
    """Return all gradients: dq and dk of each value head; those of g, Δ and D in float32.

    `dleaving` are the gradients of the states that leave each sequence (None for zero) or, if `segment` is positive,
    each segment of `segment` tokens; the gradient of the initial states is then None.
    """
    B, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.q, x.cu_seqlens)
    spans = N if dleaving is None or not segment else len(dleaving)
    dq, dk = (torch.empty((B, T, HV, K), dtype=x.q.dtype, device=x.q.device) for _ in range(2))
    dv = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    dg = torch.empty(x.g.shape, dtype=torch.float32, device=x.g.device)
    ddt = None if x.dt is None else torch.empty_like(dg)
    # zeros, because in a packed batch some entries belong to no segment and no program writes them
    dskip = None if x.D is None else torch.zeros(spans, HV, dtype=torch.float32, device=x.g.device)
    dinitial_state = None if segment else torch.empty(N, HV, K, V, dtype=torch.float32, device=x.v.device)
    stride_q, stride_k, stride_v, stride_do = (y.stride(1) // 8 for y in (x.q, x.k, x.v, do))
    backward_scan_kernel[(spans * HV,)](
        q=x.q, k=x.k, v=x.v, do=do, g=x.g, dt=x.dt, skip=x.D, states=states, dleaving=dleaving, dq=dq, dk=dk, dv=dv,
        dg=dg, ddt=ddt, dskip=dskip, dinitial_state=dinitial_state, cu_seqlens=x.cu_seqlens, stride_q=stride_q,
        stride_k=stride_k, stride_v=stride_v, stride_do=stride_do, scale=x.scale, T=T, N=N, G=G, HV=HV,
        segment=segment, K=K, V=V, SEGMENTED=segment > 0, PACKED=x.cu_seqlens is not None, num_warps=8,
    )  # fmt: skip
    return Gradients(
        q=dq, k=dk, v=dv, g=dg, initial_state=dinitial_state, dt=ddt, D=None if dskip is None else dskip.sum(0)
    )
