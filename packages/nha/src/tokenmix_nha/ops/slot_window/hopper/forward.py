"""Hopper forward kernel of a weak query chunk; it computes the same as the Triton kernel in `../forward.py`.

A chunk is weak if no slot decays by more than 80 bits in it. The kernel computes the gates' factors itself. Values
overwrite the smem buffers of keys, so that two CTAs fit on an SM. Letters as in README.md:

    cp.async  q, k ─┬─ S^K, k of the window       S^V, v, v of the window      more window tiles (32 keys)
    WGMMA           A = q̂ k̂ᵀ, z = q̂ S^K + A Ĉ     p S^V + (p Ĉᵀ + π) v         online softmax per tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import LOG2_E, barrier, mma_layout, reinterpret, wait_async_copies
from tokenmix_nha.ops.slot_window.hopper import gates
from tokenmix_nha.ops.slot_window.tile import Chunks
from tokenmix_nha.ops.slot_window.types import Inputs, Layout, Pool, Results, Saved, of_pool


@gluon.jit
def _logits(b_s, shift, first, oldest, keys, window, scale):
    """Return the scaled logits of the chunk's queries with BN keys from `first + shift` on.

    Outside the window or the sequence they are −∞.
    """
    BN: gl.constexpr = b_s.shape[1]
    layout: gl.constexpr = mma_layout(BN, 4)
    o_i = gl.arange(0, b_s.shape[0], gl.SliceLayout(1, layout))[:, None]
    o_j = shift + gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    m_s = (o_j > o_i) & (o_j <= o_i + window) & (first + o_j >= oldest) & (first + o_j < keys)
    return gl.where(m_s, b_s * scale, float("-inf"))


@cached_launch
@gluon.jit(do_not_specialize=["N", "chunks", "entries", "extra", "lead"])
def hopper_window_forward_kernel(
    q, k, v, f, q_slots, k_slots, splits, states_k, states_v, start, cu_seqlens, o, lse,
    scale, ring_k, ring_v, ring_f, ring_k_slots, length, stride_ring_k, stride_ring_v, stride_ring_f,
    stride_ring_k_slots, stride_length, slots, fresh, T, N, H, before, window, chunks, entries, extra, lead,
    M: gl.constexpr, SLOTS, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, OWN_SLOT_KEYS: gl.constexpr,
):  # fmt: skip
    """Store o `[BT, V]` and the base-2 log-sum-exp of a query chunk.

    With `slots`, the first `before` keys of a sequence are in a ring buffer of its slot.
    """
    BT: gl.constexpr = 64
    BN: gl.constexpr = 32
    dtype: gl.constexpr = q.dtype.element_ty
    square: gl.constexpr = mma_layout(BT, 4)
    by_slot: gl.constexpr = mma_layout(M, 4)
    narrow: gl.constexpr = mma_layout(BN, 4)
    wide: gl.constexpr = mma_layout(V, 4)
    row: gl.constexpr = gl.SliceLayout(1, square)
    at = Chunks(
        splits, start, cu_seqlens, T, N, H, before, window, chunks, entries, 0, 0, slots, fresh, length, stride_length
    )  # fmt: skip
    i_n, i_t, begin, tokens = gates.locate_chunk(gl.program_id(0), at, extra)
    i_h, HQ = gl.program_id(1) // GROUP, H * GROUP
    i_t -= lead
    first = i_t * BT
    keys = tokens + before
    o_q = first + window - before
    if o_q >= tokens:
        return
    entry = gates.first_entry(i_n, begin + i_n.to(gl.int64) * before, entries, cu_seqlens)
    entry = (entry + gl.maximum(i_t, 0)) * H + i_h
    count = gl.load(splits + entry, mask=i_t >= 0, other=0)
    slot, seen, oldest = gates.earlier_tokens(i_n, at)
    begin_k, begin_q = gates.begin_of_keys(begin, i_n, at) * H + i_h, begin * HQ + gl.program_id(1)
    r_k = gates.Ring(ring_k, stride_ring_k, i_h * K, slot, seen, before)
    r_v = gates.Ring(ring_v, stride_ring_v, i_h * V, slot, seen, before)
    p_k, p_v = k + begin_k * K, v + begin_k * V

    # values are copied over keys in shared memory as soon as the WGMMAs have read the keys
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    D: gl.constexpr = max(K, V)
    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_1 = gl.allocate_shared_memory(dtype, [BT, D], shared)
    s_2 = gl.allocate_shared_memory(dtype, [BN, D], shared)
    s_3 = gl.allocate_shared_memory(dtype, [D, M], swizzled)
    s_k, s_v = reinterpret(s_1, dtype, [BT, K], shared), reinterpret(s_1, dtype, [BT, V], shared)
    s_kn, s_vn = reinterpret(s_2, dtype, [BN, K], shared), reinterpret(s_2, dtype, [BN, V], shared)
    s_sk, s_sv = reinterpret(s_3, dtype, [K, M], swizzled), reinterpret(s_3, dtype, [V, M], swizzled)
    s_qs, s_ks = s_q, s_k
    if OWN_SLOT_KEYS:
        s_qs = gl.allocate_shared_memory(dtype, [BT, K], shared)
        s_ks = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_col = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_low = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    o_r = gl.arange(0, BT, gl.SliceLayout(1, by_slot))
    o_m = gl.arange(0, M, gl.SliceLayout(0, by_slot))
    m_e = (first + o_r >= oldest) & (first + o_r < keys - window)
    r_f = gates.Ring(ring_f, stride_ring_f, i_h * SLOTS, slot, seen, before)
    b_f = gates.load_ring_gates(f, begin_k, first + o_r, m_e, H, SLOTS, M, r_f)
    gates.async_copy_tokens(s_q, q + begin_q * K, o_q, 0, tokens, HQ * K)
    gates.async_copy_keys(s_k, p_k, first, oldest, keys, H * K, r_k)
    if OWN_SLOT_KEYS:
        gates.async_copy_tokens(s_qs, q_slots + begin_q * K, o_q, 0, tokens, HQ * K)
        r_ks = gates.Ring(ring_k_slots, stride_ring_k_slots, i_h * K, slot, seen, before)
        gates.async_copy_keys(s_ks, k_slots + begin_k * K, first, oldest, keys, H * K, r_ks)
    async_copy.commit_group()
    gates.async_copy_tokens(s_sk, states_k + entry * K * M, first * 0, 0, K, M)
    # copy the first tile of window keys, those after the chunk's own keys
    last = gl.minimum(first + BT + window, keys)
    gates.async_copy_keys(s_kn, p_k, first + BT, oldest, last, H * K, r_k)
    async_copy.commit_group()
    if count > 0:
        async_copy.wait_group(0)
        return

    b_log = gl.maximum(b_f * LOG2_E, -14.0)
    b_g = gates.sums_of_rows(b_log, s_col, s_low, False)
    b_row = gl.exp2(b_g)
    s_col.store((gates.enter_weight(b_f) * gl.exp2(-b_g)).to(dtype))
    wait_async_copies(1)
    b_a = gates.mma(s_qs, s_ks.permute((1, 0)), BT)
    if OWN_SLOT_KEYS:
        b_u = gates.mma(s_q, s_k.permute((1, 0)), BT)
    wait_async_copies(0)
    b_z, b_s = gates.mma(s_qs, s_sk, M), gates.mma(s_q, s_kn.permute((1, 0)), BN)
    if OWN_SLOT_KEYS:
        b_a, b_u, b_z, b_s = warpgroup_mma_wait(0, deps=[b_a, b_u, b_z, b_s])
    else:
        b_a, b_z, b_s = warpgroup_mma_wait(0, deps=[b_a, b_z, b_s])
        b_u = b_a
    barrier()
    gates.async_copy_tokens(s_sv, states_v + entry * V * M, first * 0, 0, V, M)
    gates.async_copy_keys(s_v, p_v, first, oldest, keys, H * V, r_v)
    gates.async_copy_keys(s_vn, p_v, first + BT, oldest, last, H * V, r_v)
    async_copy.commit_group()
    # the chunk's queries lie `window` tokens after its keys: query i sees keys j ≤ i in the slots, j > i in its window
    o_i, o_j = gl.arange(0, BT, row)[:, None], gl.arange(0, BT, gl.SliceLayout(0, square))[None, :]
    m_b = o_j <= o_i
    b_left = gates.as_left(gl.where(m_b, b_a, 0.0).to(dtype), M)
    b_z = warpgroup_mma(b_left, s_col, b_z, is_async=True)
    b_z, b_left = warpgroup_mma_wait(0, deps=[b_z, b_left])
    scale = scale * LOG2_E
    b_w = _logits(b_u, 0, first, oldest, keys, window, scale)
    b_z = gl.where((o_m < SLOTS)[None, :], b_z * b_row * scale, float("-inf"))
    b_s = _logits(b_s, BT, first, oldest, keys, window, scale)
    b_max = gl.maximum(gl.convert_layout(gl.max(b_z, 1), row), gl.max(b_w, 1))
    b_max = gl.maximum(b_max, gl.convert_layout(gl.max(b_s, 1), row))
    b_p = gl.exp2(b_z - gl.convert_layout(b_max, gl.SliceLayout(1, by_slot))[:, None])
    b_w = gl.exp2(b_w - b_max[:, None])
    b_s = gl.exp2(b_s - gl.convert_layout(b_max, gl.SliceLayout(1, narrow))[:, None])
    b_l = gl.convert_layout(gl.sum(b_p, 1), row) + gl.sum(b_w, 1) + gl.convert_layout(gl.sum(b_s, 1), row)
    b_y = (b_p * b_row).to(dtype)
    b_left = gates.as_left(b_y, BT)
    b_c, b_left = warpgroup_mma_wait(0, deps=[gates.mma(b_left, s_col.permute((1, 0)), BT), b_left])
    b_w = gates.as_left((b_w + gl.where(m_b, b_c, 0.0)).to(dtype), V)
    b_y, b_sn = gates.as_left(b_y, V), gates.as_left(b_s.to(dtype), V)
    wait_async_copies(0)
    b_o = gates.mma(b_y, s_sv.permute((1, 0)), V)
    b_o = warpgroup_mma(b_sn, s_vn, b_o, is_async=True)
    b_o = warpgroup_mma(b_w, s_v, b_o, is_async=True)
    b_o, b_y, b_sn, b_w = warpgroup_mma_wait(0, deps=[b_o, b_y, b_sn, b_w])

    # compute the remaining window tiles, if the window is longer than one tile
    for shift in range(BT + BN, last - first, BN):
        barrier()
        gates.async_copy_keys(s_kn, p_k, first + shift, oldest, last, H * K, r_k)
        async_copy.commit_group()
        wait_async_copies(0)
        b_s = warpgroup_mma_wait(0, deps=[gates.mma(s_q, s_kn.permute((1, 0)), BN)])
        barrier()
        gates.async_copy_keys(s_vn, p_v, first + shift, oldest, last, H * V, r_v)
        async_copy.commit_group()
        b_s = _logits(b_s, shift, first, oldest, keys, window, scale)
        b_new = gl.maximum(b_max, gl.convert_layout(gl.max(b_s, 1), row))
        b_shrink = gl.exp2(b_max - b_new)
        b_s = gl.exp2(b_s - gl.convert_layout(b_new, gl.SliceLayout(1, narrow))[:, None])
        b_l = b_l * b_shrink + gl.convert_layout(gl.sum(b_s, 1), row)
        b_o *= gl.convert_layout(b_shrink, gl.SliceLayout(1, wide))[:, None]
        b_sn = gates.as_left(b_s.to(dtype), V)
        wait_async_copies(0)
        b_o = warpgroup_mma(b_sn, s_vn, b_o, is_async=True)
        b_o, b_sn = warpgroup_mma_wait(0, deps=[b_o, b_sn])
        b_max = b_new

    o_t = o_q + gl.arange(0, BT, row)
    gl.store(lse + begin_q + o_t.to(gl.int64) * HQ, b_max + gl.log2(b_l), mask=(o_t >= 0) & (o_t < tokens))
    barrier()
    s_v.store((b_o * gl.convert_layout(1.0 / b_l, gl.SliceLayout(1, wide))[:, None]).to(dtype))
    barrier()
    gates.store(s_v, o + begin_q * V, o_q, 0, tokens, HQ * V)


def hopper_window_outputs(
    launch, x: Inputs, y: Layout, results: Results, saved: Saved, pool: Pool | None = None
) -> None:
    """Fill o and the log-sum-exp for the weak chunks, in which no slot decays by more than 80 bits.

    With `pool`, the carried windows are in its ring buffers.
    """
    launch(
        hopper_window_forward_kernel, (y.query_chunks * y.rows, y.H * y.GROUP),
        q=x.q, k=x.k, v=x.v, f=x.f, q_slots=x.q_slots, k_slots=x.k_slots, splits=saved.splits, states_k=saved.states_k,
        states_v=saved.states_v, start=x.start, cu_seqlens=x.cu_seqlens, o=results.o, lse=saved.lse, scale=x.scale,
        **of_pool(pool, "ring_k", "ring_v", "ring_f", "ring_k_slots"), **y.of_queries, **y.tile, GROUP=y.GROUP,
        OWN_SLOT_KEYS=x.k_slots is not None, num_warps=4,
    )  # fmt: skip
