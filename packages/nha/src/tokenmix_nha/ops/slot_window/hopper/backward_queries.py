"""Hopper kernel of a weak chunk's query gradients; it also fills `Softmax`, which the other gradients need.

A chunk is weak if no slot decays by more than 80 bits in it. A CTA is one warpgroup. Each buffer is one pipeline stage;
later loads reuse buffers after a barrier:

    cp.async  q̂, k̂, do, v ── S^K, S^V             keys and values of the window, into the buffers of gates and v
    WGMMA     A = q̂ k̂ᵀ, B = do vᵀ                 z = q̂ S^K + A Ĉ, dp = do S^V + B Ĉ; δ from the window's tiles
    WGMMA     dq̂ = dz S^Kᵀ + (dz Ĉᵀ + dζ) k̂       dq: further tiles of the window, 32 keys each
    store     p, dz and x after dp, dq at the end
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import (
    LOG2_E,
    async_copy_rows,
    barrier,
    mma_layout,
    reinterpret,
    row_layout,
    wait_async_copies,
)
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.hopper import gates
from tokenmix_nha.ops.slot_window.tile import Chunks
from tokenmix_nha.ops.slot_window.types import Backward, Softmax

# tiles in smem: queries and do of a chunk; BN keys and values in the windows of these queries
_Tiles = namedtuple("_Tiles", "q do k v")
# pointers to a sequence's keys and values, and the range of window keys: `first + shift_0` … `first + shift_1`
_KeyWindow = namedtuple("_KeyWindow", "k v shift_0 shift_1 window first oldest keys H")


@gluon.jit
def _window(s, lse_i, shift, w, scale_2):
    """Return the probabilities of the BN window keys at `shift`, and do · v for their values, both `[64, BN]`."""
    BN: gl.constexpr = s.k.shape[0]
    layout: gl.constexpr = mma_layout(BN, 4)
    o_i = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    o_n = shift + gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    b_s, b_d = gates.mma_opaque(s.q, s.k.permute((1, 0)), BN), gates.mma_opaque(s.do, s.v.permute((1, 0)), BN)
    b_s, b_d = warpgroup_mma_wait(0, deps=[b_s, b_d])
    m_s = (o_n > o_i) & (o_n <= o_i + w.window) & (w.first + o_n >= w.oldest) & (w.first + o_n < w.keys)
    b_s = b_s * scale_2 - gl.convert_layout(lse_i, gl.SliceLayout(1, layout))[:, None]
    return gl.exp2(gl.where(m_s, b_s, float("-inf"))), b_d


@gluon.jit
def _add_window_delta(delta_i, s, lse_i, w, scale_2):
    """Add to δ the sum of probability · (do · v) over the window; then start to copy the first key tile again, for dq.

    A window of at most BN keys is a single tile, which stays in smem.
    δ must not be do · o: if all slots are nearly equal, dz sums to 0 only if δ is rounded like p and dp.
    """
    BN: gl.constexpr = s.k.shape[0]
    K: gl.constexpr = s.k.shape[1]
    V: gl.constexpr = s.v.shape[1]
    for shift in range(w.shift_0, w.shift_1, BN):
        wait_async_copies(0)
        b_s, b_d = _window(s, lse_i, shift, w, scale_2)
        delta_i += gl.convert_layout(gl.sum(b_s * b_d, 1), gl.SliceLayout(1, mma_layout(64, 4)))
        if w.window > BN:
            barrier()
            after = gl.where(shift + BN < w.shift_1, shift + BN, w.shift_0)
            gates.async_copy_tokens(s.k, w.k, w.first + after, w.oldest, w.keys, w.H * K)
            gates.async_copy_tokens(s.v, w.v, w.first + after, w.oldest, w.keys, w.H * V)
            async_copy.commit_group()
    return delta_i


@gluon.jit
def _delta_from_outputs(s_do, o, begin_q, o_q, length, HQ):
    """Return δ = do · o, computed from the stored o, which has 16 bits."""
    lines: gl.constexpr = row_layout(s_do.shape[1], 4)
    o_t = gl.arange(0, s_do.shape[0], gl.SliceLayout(1, lines))
    o_d = gl.arange(0, s_do.shape[1], gl.SliceLayout(0, lines))
    m_o = (o_q + o_t >= 0) & (o_q + o_t < length)
    p_o = o + ((begin_q + (o_q + o_t).to(gl.int64) * HQ) * s_do.shape[1])[:, None] + o_d[None, :]
    b_o = gl.load(p_o, mask=m_o[:, None], other=0.0).to(gl.float32) * s_do.load(lines).to(gl.float32)
    return gl.sum(b_o, 1)


@gluon.jit
def _add_window(b_dq, s, lse_i, delta_i, w, scale, scale_2):
    """Add to dq the sum over the window's keys; the caller has started to copy the first key tile."""
    BN: gl.constexpr = s.k.shape[0]
    K: gl.constexpr = s.k.shape[1]
    V: gl.constexpr = s.v.shape[1]
    layout: gl.constexpr = gl.SliceLayout(1, mma_layout(BN, 4))
    for shift in range(w.shift_0, w.shift_1, BN):
        wait_async_copies(0)
        b_s, b_ds = _window(s, lse_i, shift, w, scale_2)
        b_ds = b_s * (b_ds - gl.convert_layout(delta_i, layout)[:, None]) * scale
        b_ds = gates.as_left(b_ds.to(s.k.dtype), K)
        b_dq = gates.mma_add_opaque(b_ds, s.k, b_dq)
        b_dq, b_ds = warpgroup_mma_wait(0, deps=[b_dq, b_ds])
        if shift + BN < w.shift_1:
            barrier()
            gates.async_copy_tokens(s.k, w.k, w.first + shift + BN, w.oldest, w.keys, w.H * K)
            gates.async_copy_tokens(s.v, w.v, w.first + shift + BN, w.oldest, w.keys, w.H * V)
            async_copy.commit_group()
    return b_dq


@cached_launch
@gluon.jit(do_not_specialize=["N", "chunks", "entries", "extra", "lead"])
def hopper_backward_queries_kernel(
    q, k, v, f, q_slots, k_slots, splits, states_k, states_v, start, cu_seqlens, o, lse, do, dq, dq_slots, p, dz, x,
    delta,
    scale, T, N, H, before, window, chunks, entries, extra, lead,
    M: gl.constexpr, SLOTS, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, OWN_SLOT_KEYS: gl.constexpr,
    SHORT: gl.constexpr,
):  # fmt: skip
    """Store dq, and dq_slots if OWN_SLOT_KEYS, `[BT, K]` of a query chunk, and the fields p, dz, x `[BT, M]` and delta
    `[BT]` of `Softmax`. SHORT: the window is short, so that δ is summed from probabilities, not from the rounded o."""
    BT: gl.constexpr = 64
    BN: gl.constexpr = 32
    dtype: gl.constexpr = q.dtype.element_ty
    square: gl.constexpr = mma_layout(BT, 4)
    slots: gl.constexpr = mma_layout(M, 4)
    row: gl.constexpr = gl.SliceLayout(1, square)
    each: gl.constexpr = gl.SliceLayout(1, slots)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    HQ = H * GROUP
    i_q = gl.program_id(0) % HQ
    i_h = i_q // GROUP
    at = Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries)
    i_n, i_t, begin, length = gates.locate_chunk(gl.program_id(0) // HQ, at, extra)
    i_t -= lead
    begin_k = begin + i_n.to(gl.int64) * before
    first, keys = i_t * BT, length + before
    # the chunk's queries lie `window` tokens after its keys: query r sees keys ≤ r in the slots, keys > r in its window
    o_q = first + window - before
    if o_q >= length:
        return
    entry = (gates.first_entry(i_n, begin_k, entries, cu_seqlens) + gl.maximum(i_t, 0)) * H + i_h
    if i_t >= 0:  # noqa: SIM102
        if gl.load(splits + entry) > 0:
            return
    oldest = 0
    if start is not None:
        oldest = gl.load(start + i_n)
    begin_k, begin_q = begin_k * H + i_h, begin * HQ + i_q

    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_do = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_v = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_sk = gl.allocate_shared_memory(dtype, [K, M], swizzled)
    # this buffer first contains the value slots, later p and dz
    s_y = gl.allocate_shared_memory(dtype, [2, BT, M], swizzled)
    s_sv = reinterpret(s_y, dtype, [V, M], swizzled)
    s_col = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    # this buffer first contains the low bf16 parts of the gates, later keys of the window
    s_1 = gl.allocate_shared_memory(dtype, [max(BT * M, BN * K) // 64, 64], shared)
    s_low = reinterpret(s_1, dtype, [BT, M], swizzled)
    p_k, p_v = k + begin_k * K, v + begin_k * V
    if OWN_SLOT_KEYS:
        gates.async_copy_tokens(s_q, q_slots + begin_q * K, o_q, 0, length, HQ * K)
        gates.async_copy_tokens(s_k, k_slots + begin_k * K, first, oldest, keys, H * K)
    else:
        gates.async_copy_tokens(s_q, q + begin_q * K, o_q, 0, length, HQ * K)
        gates.async_copy_tokens(s_k, p_k, first, oldest, keys, H * K)
    gates.async_copy_tokens(s_do, do + begin_q * V, o_q, 0, length, HQ * V)
    gates.async_copy_tokens(s_v, p_v, first, oldest, keys, H * V)
    async_copy.commit_group()
    async_copy_rows(s_sk, states_k + entry * K * M, M, K, 4)
    async_copy_rows(s_sv, states_v + entry * V * M, M, V, 4)
    async_copy.commit_group()

    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, gl.SliceLayout(0, square))
    o_r, o_m = gl.arange(0, BT, each), gl.arange(0, M, gl.SliceLayout(0, slots))
    m_e = (first + o_r >= gl.maximum(oldest, 0)) & (first + o_r < keys - window)
    b_f = gates.load_gates(f, begin_k, first + o_r, m_e, H, SLOTS, M)
    m_q = (o_q + o_i >= 0) & (o_q + o_i < length)
    o_row = begin_q + (o_q + o_i).to(gl.int64) * HQ
    # rows without a query get lse = ∞, which makes their probabilities 0
    lse_i = gl.load(lse + o_row, mask=m_q, other=float("inf"))
    b_g = gates.sums_of_rows(gl.maximum(b_f * LOG2_E, -14.0), s_col, s_low, False)
    s_col.store((gates.enter_weight(b_f) * gl.exp2(-b_g)).to(dtype))
    # the window's tiles overwrite the buffers of s_low and v
    s_kn, s_vn = reinterpret(s_1, dtype, [BN, K], shared), reinterpret(s_v, dtype, [BN, V], shared)
    shift_0 = BT + gl.maximum(oldest - first - BT, 0) // BN * BN
    shift_1 = gl.minimum(BT + window, keys - first)
    tiles = _Tiles(s_q, s_do, s_kn, s_vn)
    window_keys = _KeyWindow(p_k, p_v, shift_0, shift_1, window, first, oldest, keys, H)

    # masks [query, token]: m_p if the query sees the token through the slots, m_w if it sees it in the window
    wait_async_copies(1)
    b_a, b_dp = gates.mma_opaque(s_q, s_k.permute((1, 0)), BT), gates.mma_opaque(s_do, s_v.permute((1, 0)), BT)
    b_a, b_dp = warpgroup_mma_wait(0, deps=[b_a, b_dp])
    barrier()
    gates.async_copy_tokens(s_kn, p_k, first + shift_0, oldest, keys, H * K)
    gates.async_copy_tokens(s_vn, p_v, first + shift_0, oldest, keys, H * V)
    async_copy.commit_group()
    scale_2 = scale * LOG2_E
    m_p = o_j[None, :] <= o_i[:, None]
    m_w = (o_j[None, :] > o_i[:, None]) & (o_j[None, :] <= o_i[:, None] + window) & (first + o_j >= oldest)[None, :]
    m_w = m_w & (first + o_j < keys)[None, :]
    b_left, b_right = (
        gates.as_left(gl.where(m_p, b_a, 0.0).to(dtype), M),
        gates.as_left(gl.where(m_p, b_dp, 0.0).to(dtype), M),
    )
    if not OWN_SLOT_KEYS:
        b_w = gl.exp2(gl.where(m_w, b_a * scale_2 - lse_i[:, None], float("-inf")))
    wait_async_copies(1)
    b_z, b_d = gates.mma_opaque(s_q, s_sk, M), gates.mma_opaque(s_do, s_sv, M)
    b_z = gates.mma_add_opaque(b_left, s_col, b_z)
    b_d = gates.mma_add_opaque(b_right, s_col, b_d)
    b_z, b_d, b_left, b_right = warpgroup_mma_wait(0, deps=[b_z, b_d, b_left, b_right])
    if OWN_SLOT_KEYS:
        # queries and keys of the window overwrite the buffers of the slots' queries and values
        barrier()
        s_kw = reinterpret(s_y, dtype, [BT, K], shared)
        gates.async_copy_tokens(s_q, q + begin_q * K, o_q, 0, length, HQ * K)
        gates.async_copy_tokens(s_kw, p_k, first, oldest, keys, H * K)
        async_copy.commit_group()
        wait_async_copies(0)
        b_w = warpgroup_mma_wait(0, deps=[gates.mma_opaque(s_q, s_kw.permute((1, 0)), BT)])
        b_w = gl.exp2(gl.where(m_w, b_w * scale_2 - lse_i[:, None], float("-inf")))
    if SHORT:
        delta_i = gl.sum(b_w * b_dp, 1)
        delta_i = _add_window_delta(delta_i, tiles, lse_i, window_keys, scale_2)
    else:
        delta_i = gl.convert_layout(_delta_from_outputs(s_do, o, begin_q, o_q, length, HQ), row)

    b_row = gl.exp2(b_g)
    # the columns from SLOTS on are padding
    b_p = gl.where((o_m < SLOTS)[None, :], b_z * b_row * scale_2, float("-inf"))
    b_p = gl.exp2(b_p - gl.convert_layout(lse_i, each)[:, None])
    if SHORT:
        delta_i += gl.convert_layout(gl.sum(b_p * b_d * b_row, 1), row)
    gl.store(delta + o_row, delta_i, mask=m_q)
    b_y = gates.rounded(b_p * b_row, dtype)
    b_dz = gates.rounded(b_p * (b_d * b_row - gl.convert_layout(delta_i, each)[:, None]) * (b_row * scale), dtype)
    # x uses the same rounded factors as the key gradients, so that the rounding errors of both cancel in df
    b_x = b_y.to(gl.float32) * b_d + b_dz.to(gl.float32) * b_z
    p_x = x + ((begin_q + (o_q + o_r).to(gl.int64) * HQ) * M)[:, None] + o_m[None, :]
    gl.store(p_x, b_x, mask=((o_q + o_r >= 0) & (o_q + o_r < length))[:, None])
    if OWN_SLOT_KEYS:
        b_left, b_right = gates.as_left(b_dz, BT), gates.as_left(b_dz, K)
        b_c, b_dq = (
            gates.mma_opaque(b_left, s_col.permute((1, 0)), BT),
            gates.mma_opaque(b_right, s_sk.permute((1, 0)), K),
        )
        b_c, b_dq, b_left, b_right = warpgroup_mma_wait(0, deps=[b_c, b_dq, b_left, b_right])
        b_right = gates.as_left(gl.where(m_p, b_c, 0.0).to(dtype), K)
        b_dq = gates.mma_add_opaque(b_right, s_k, b_dq)
        barrier()
        s_dz = reinterpret(s_sk, dtype, [BT, M], shared)
        s_col.store(b_y)
        s_dz.store(b_dz)
        b_dq, b_right = warpgroup_mma_wait(0, deps=[b_dq, b_right])
        barrier()
        s_k.store(b_dq.to(dtype))
        gates.store(s_col, p + begin_q * M, o_q, 0, length, HQ * M)
        gates.store(s_dz, dz + begin_q * M, o_q, 0, length, HQ * M)
        b_w = gates.mma_opaque(s_q, s_kw.permute((1, 0)), BT)
        barrier()
        gates.store(s_k, dq_slots + begin_q * K, o_q, 0, length, HQ * K)
        b_w = warpgroup_mma_wait(0, deps=[b_w])
        b_w = gl.exp2(gl.where(m_w, b_w * scale_2 - lse_i[:, None], float("-inf")))
        b_right = gates.as_left((b_w * (b_dp - delta_i[:, None]) * scale).to(dtype), K)
        b_dq = gates.mma_opaque(b_right, s_kw, K)
        b_dq, b_right = warpgroup_mma_wait(0, deps=[b_dq, b_right])
    else:
        barrier()
        s_y.index(0).store(b_y)
        s_y.index(1).store(b_dz)
        b_left, b_right = gates.as_left(b_dz, BT), gates.as_left(b_dz, K)
        b_c = gates.mma_opaque(b_left, s_col.permute((1, 0)), BT)
        b_dq = gates.mma_opaque(b_right, s_sk.permute((1, 0)), K)
        barrier()
        gates.store(s_y.index(0), p + begin_q * M, o_q, 0, length, HQ * M)
        gates.store(s_y.index(1), dz + begin_q * M, o_q, 0, length, HQ * M)
        b_c, b_dq, b_left, b_right = warpgroup_mma_wait(0, deps=[b_c, b_dq, b_left, b_right])
        b_w = gl.where(m_p, b_c, b_w * (b_dp - delta_i[:, None]) * scale).to(dtype)
        b_right = gates.as_left(b_w, K)
        b_dq = gates.mma_add_opaque(b_right, s_k, b_dq)
        b_dq, b_right = warpgroup_mma_wait(0, deps=[b_dq, b_right])
    b_dq = _add_window(b_dq, tiles, lse_i, delta_i, window_keys, scale, scale_2)
    barrier()
    s_q.store(b_dq.to(dtype))
    barrier()
    gates.store(s_q, dq + begin_q * K, o_q, 0, length, HQ * K)
    async_copy.wait_group(0)


def hopper_query_gradients(launch, b: Backward, softmax: Softmax) -> None:
    """Fill dq, dq_slots and `softmax` for the weak chunks, in which no slot decays by more than 80 bits."""
    x, y, saved = b.x, b.y, b.saved
    launch(
        hopper_backward_queries_kernel, (y.query_chunks * y.rows * y.H * y.GROUP,),
        q=x.q, k=x.k, v=x.v, f=x.f, q_slots=x.q_slots, k_slots=x.k_slots, splits=saved.splits, states_k=saved.states_k,
        states_v=saved.states_v, start=x.start, cu_seqlens=x.cu_seqlens, o=b.o, lse=saved.lse, do=b.do, dq=b.grads.dq,
        dq_slots=b.grads.dq_slots, **softmax._asdict(), scale=x.scale, **y.of_queries, **y.tile, GROUP=y.GROUP,
        OWN_SLOT_KEYS=x.k_slots is not None, SHORT=y.window <= tuning.SHORT_WINDOW, num_warps=4,
    )  # fmt: skip
