"""`gradients` on Hopper by a walk against time: a sequence or segment of a head a program, D in its registers.

The states' gradients never leave the SM, and what enters the states as Δ v and what skips them as D v are
taken apart where their products are at hand.
"""

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
from tokenmix_core.kernels.gluon.hopper import (
    async_copy_rows,
    barrier,
    mma_layout_split_n,
    opaque,
    store_rows,
    wait_async_copies,
)
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.ssd.hopper.forward import locate_span
from tokenmix_core.ops.ssd.hopper.intra_chunk import inner_gradients
from tokenmix_core.ops.ssd.hopper.mma import multiply
from tokenmix_core.ops.ssd.hopper.smem_vectors import (
    allocate_parts,
    allocate_vectors,
    as_matrix,
    column,
    gather,
    head_rows,
    load_numbers,
    store_decay_gradients,
    store_decays,
    store_row_sums,
)
from tokenmix_core.ops.ssd.types import Gradients, Inputs


@gluon.constexpr_function
def state_layout(K, V, warps):
    """A product `[K, V]`: 16 rows a warp, and a part of the columns where there are more warps than that."""
    return gl.NVMMADistributedLayout([3, 0], [K // 16, warps * 16 // K], [16, V * K // (16 * warps), 16])


@gluon.jit
def fetch_chunk(s_q, s_k, s_v, s_do, p_q, p_k, p_v, p_do, o_t, stride_q, stride_k, stride_v, stride_do, rows):
    """Begin to copy the tokens of a chunk, from row `o_t` on."""
    W: gl.constexpr = gl.num_warps()
    o_t = o_t.to(gl.int64)
    async_copy_rows(s_q, p_q + o_t * stride_q, stride_q, rows, W, True)
    async_copy_rows(s_k, p_k + o_t * stride_k, stride_k, rows, W, True)
    async_copy_rows(s_v, p_v + o_t * stride_v, stride_v, rows, W, True)
    async_copy_rows(s_do, p_do + o_t * stride_do, stride_do, rows, W, True)


@gluon.jit
def store_chunk(dq, dk, dv, dg, s_q, s_k, s_v, crossing_h, later_h, o_out, HV, rows):
    """Store a chunk's gradients, of which those of q, k and v lie in the places of these."""
    W: gl.constexpr = gl.num_warps()
    K: gl.constexpr = s_q.shape[1]
    V: gl.constexpr = s_v.shape[1]
    store_rows(dq + o_out * K, s_q, HV * K, rows, W, True)
    store_rows(dk + o_out * K, s_k, HV * K, rows, W, True)
    store_rows(dv + o_out * V, s_v, HV * V, rows, W, True)
    store_decay_gradients(dg + o_out, HV, rows, crossing_h, later_h)


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def backward_scan_kernel(
    q, k, v, do, g, dt, skip, states, dleaving, dq, dk, dv, dg, ddt, dskip, dinitial_state, cu_seqlens,
    stride_q, stride_k, stride_v, stride_do, scale, T, N, G, HV, segment,
    K: gl.constexpr, V: gl.constexpr, SEGMENTED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Vectors are in shared memory `x_h`, two chunks of what is needed of the next one; strides count 16 bytes."""
    BT: gl.constexpr = 64
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = q.dtype.element_ty
    tile: gl.constexpr = state_layout(K, V, W)
    left: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    wide: gl.constexpr = mma_layout_split_n(K, W)
    narrow: gl.constexpr = mma_layout_split_n(V, W)
    by_head: gl.constexpr = head_rows(W)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    i_h, i_s = gl.program_id(0) % HV, gl.program_id(0) // HV
    begin, length, i_c = locate_span(i_s, T, N, segment, cu_seqlens, SEGMENTED, PACKED)
    if SEGMENTED and length <= 0:
        return
    # rows begin at multiples of 16 bytes
    stride_q, stride_k, stride_v, stride_do = stride_q * 8, stride_k * 8, stride_v * 8, stride_do * 8
    i_g, o_h = i_h // (HV // G), begin * HV + i_h
    p_q, p_k = q + begin * stride_q + i_g * K, k + begin * stride_k + i_g * K
    p_v, p_do = v + begin * stride_v + i_h * V, do + begin * stride_do + i_h * V
    p_s = states + (i_c * HV + i_h) * K * V

    q_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    k_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    do_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    s_s = gl.allocate_shared_memory(dtype, [K, V], shared)
    s_d = gl.allocate_shared_memory(dtype, [K, V], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_dp = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    b_h, from_h, to_h = allocate_vectors(2, BT), allocate_vectors(2, BT), allocate_vectors(2, BT)
    row_h, query_h, key_h = allocate_parts(1, W // 4), allocate_parts(1, W // 4), allocate_parts(1, W // 4)
    own_h, skip_h, column_h = allocate_parts(1, W // 4), allocate_parts(1, W // 4), allocate_parts(1, 4)
    end_h, crossing_h, later_h = allocate_vectors(1, K), allocate_vectors(1, BT), allocate_vectors(1, BT)

    i_t = gl.maximum(gl.cdiv(length, BT) - 1, 0)
    rows, o_t = length - i_t * BT, (i_t * BT).to(gl.int64)
    fetch_chunk(
        q_2.index(0), k_2.index(0), v_2.index(0), do_2.index(0), p_q, p_k, p_v, p_do, o_t,
        stride_q, stride_k, stride_v, stride_do, rows,
    )  # fmt: skip
    async_copy_rows(s_s, p_s + i_t.to(gl.int64) * HV * K * V, V, K, W)
    async_copy.commit_group()
    b_g = load_numbers(g + o_h + o_t * HV, HV, rows, 1)
    total, b_to = store_decays(b_h.index(0), from_h.index(0), to_h.index(0), b_g, scale)
    # what a token enters the state with at the chunk's end
    dt_h, enter_h = None, to_h
    if dt is not None:
        dt_h, enter_h = allocate_vectors(2, BT), allocate_vectors(2, BT)
        b_dt = load_numbers(dt + o_h + o_t * HV, HV, rows, 1)
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
        here, then = i % 2, (i + 1) % 2
        s_q, s_k, s_v, s_do = q_2.index(here), k_2.index(here), v_2.index(here), do_2.index(here)
        token = (gl.cdiv(length, BT) - 1 - i) * BT
        rows, o_t = length - token, (gl.maximum(token - BT, 0)).to(gl.int64)
        wait_async_copies(0)
        b_qk, b_dp = multiply(s_q, s_k.permute((1, 0)), BT), multiply(s_do, s_v.permute((1, 0)), BT)
        b_dq, b_kd = multiply(s_do, s_s.permute((1, 0)), K), multiply(s_k, s_d, V)
        # the gradients of the chunk after this one leave beside these products
        if i > 0:
            store_chunk(
                dq, dk, dv, dg, q_2.index(then), k_2.index(then), v_2.index(then), crossing_h, later_h,
                (begin + token + BT) * HV + i_h, HV, rows - BT,
            )  # fmt: skip
        if token > 0:
            fetch_chunk(
                q_2.index(then), k_2.index(then), v_2.index(then), do_2.index(then), p_q, p_k, p_v, p_do, o_t,
                stride_q, stride_k, stride_v, stride_do, BT,
            )  # fmt: skip
            async_copy.commit_group()
        b_g = load_numbers(g + o_h + o_t * HV, HV, gl.minimum(token, BT), 1)
        if dt is not None:
            b_dt = load_numbers(dt + o_h + o_t * HV, HV, gl.minimum(token, BT), 1)
        end_h.index(0).store(gl.sum(b_d * s_s.load(tile).to(gl.float32), 1))
        b_qk, b_dp = warpgroup_mma_wait(2, deps=[b_qk, b_dp])
        b_p, b_dp = inner_gradients(
            b_qk, b_dp, b_h.index(here), None if dt_h is None else dt_h.index(here), b_skip,
            row_h, column_h, own_h, skip_h, 0, scale,
        )  # fmt: skip
        s_p.store(b_p.to(dtype))
        s_dp.store(b_dp.to(dtype))
        b_dq, b_kd = warpgroup_mma_wait(0, deps=[b_dq, b_kd])
        store_row_sums(query_h, 0, b_dq * s_q.load(wide).to(gl.float32))
        store_row_sums(key_h, 0, b_kd * s_v.load(narrow).to(gl.float32))
        b_dk = multiply(s_v, s_d.permute((1, 0)), K)
        b_dq *= column(from_h, here, wide)
        b_dv = b_kd * column(enter_h, here, narrow)
        to_dk = column(enter_h, here, wide)
        from_j = from_h.index(here).load(gl.SliceLayout(0, left))[None, :]
        b_q = (s_q.permute((1, 0)).load(left).to(gl.float32) * from_j).to(dtype)
        b_d *= gl.exp2(gl.sum(total, 0))
        b_dk = warpgroup_mma_wait(0, deps=[b_dk])
        b_dk *= to_dk
        fence_async_shared()
        barrier()
        if token > 0:
            async_copy_rows(s_s, p_s + (token // BT - 1).to(gl.int64) * HV * K * V, V, K, W, True)
            async_copy.commit_group()

        # dQ += dP K; dV += Pᵀ dO; dK += dPᵀ Q; D ← e^b_C D + Qᵀ (scale e^b dO)
        b_dq = warpgroup_mma(s_dp, s_k, b_dq, is_async=True)
        b_dv = warpgroup_mma(s_p.permute((1, 0)), s_do, b_dv, is_async=True)
        b_dk = warpgroup_mma(s_dp.permute((1, 0)), s_q, b_dk, is_async=True)
        b_d = warpgroup_mma(b_q, s_do, b_d, is_async=True)
        b_dq, b_dv, b_dk, b_d, b_q = warpgroup_mma_wait(0, deps=[b_dq, b_dv, b_dk, b_d, b_q])
        barrier()
        s_q.store(b_dq.to(dtype))
        s_k.store(b_dk.to(dtype))
        s_v.store(b_dv.to(dtype))
        s_d.store(b_d.to(dtype))
        b_column, b_later = gather(column_h), gather(key_h) * as_matrix(to_h.index(here), 1, BT).load(by_head)
        b_query = gather(query_h) * as_matrix(from_h.index(here), 1, BT).load(by_head)
        if dt is not None:
            p_ddt = ddt + o_h + (token + o_1).to(gl.int64) * HV
            gl.store(p_ddt, b_column + b_later + gather(own_h), mask=o_1 < rows)
            b_delta = as_matrix(dt_h.index(here), 1, BT).load(by_head)  # type: ignore[union-attr]
            b_column, b_later = b_column * b_delta, b_later * b_delta
        # what crosses the whole chunk crosses its last decay, as all others
        b_end = gl.exp2(total) * gl.sum(as_matrix(end_h, 1, K).load(by_head), 1)
        b_crossing = gather(row_h) - b_column + b_query + gl.where(o_1 == BT - 1, b_end[:, None], 0.0)
        as_matrix(crossing_h, 1, BT).store(b_crossing)
        as_matrix(later_h, 1, BT).store(b_later)
        if skip is not None:
            skipped += gather(skip_h)
        total, b_to = store_decays(b_h.index(then), from_h.index(then), to_h.index(then), b_g, scale)
        if dt is not None:
            as_matrix(dt_h.index(then), 1, BT).store(b_dt)  # type: ignore[union-attr]
            as_matrix(enter_h.index(then), 1, BT).store(b_dt * b_to)
    wait_async_copies(0)
    last = (gl.cdiv(length, BT) + 1) % 2
    if length > 0:
        store_chunk(
            dq, dk, dv, dg, q_2.index(last), k_2.index(last), v_2.index(last), crossing_h, later_h,
            o_h, HV, length,
        )  # fmt: skip
    if dinitial_state is not None:
        gl.store(dinitial_state + o_state + opaque(o_k)[:, None] * V + o_v[None, :], b_d)
    if skip is not None:
        gl.store(dskip + i_s * HV + i_h, gl.sum(gl.sum(skipped, 1), 0))


def hopper_backward_scan(x: Inputs, *, do: Tensor, states: Tensor, dleaving: Tensor | None, segment: int) -> Gradients:
    """Return all gradients: dq and dk of each value head; those of the decays, Δ and D in float32.

    `dleaving` are the gradients of the states that leave each sequence (None for zero), or each segment of `segment`
    tokens. For segments the gradient of the initial states is None.
    """
    B, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    N = num_sequences(x.q, x.cu_seqlens)
    spans = N if dleaving is None or not segment else len(dleaving)
    dq, dk = (torch.empty((B, T, HV, K), dtype=x.q.dtype, device=x.q.device) for _ in range(2))
    dv = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    dg = torch.empty(x.g.shape, dtype=torch.float32, device=x.g.device)
    ddt = None if x.dt is None else torch.empty_like(dg)
    # not every slot of packed segments is one
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
