"""Hopper kernel of the key and value gradients of a weak chunk. Tiles are transposed, `[token, query]`.

A chunk is weak if no slot decays by more than 80 bits in it. A CTA is one warpgroup. Each buffer is one pipeline stage;
later loads reuse buffers after a barrier. w: weight of each token in the slots at the chunk's end; q', do': BN queries
whose windows reach tokens of the chunk, and their do; other letters as in README.md:

    cp.async  q̂, k, v, do ── p, dz ── dS^K, dS^V   q', do' into the buffers of p and dz (several query heads, or own
                                                   slot keys: into those of dS^K and dS^V)
    WGMMA     sums of gates → Ĉ, w                 P = Ĉ pᵀ, Z = Ĉ dzᵀ up to the token's row; later rows π, dζ
    WGMMA     dv = w dS^Vᵀ + P do                  dk = w dS^Kᵀ + Z q, then tiles of the window, 32 queries each
    store     dv and dk through the buffers of do and q
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import LOG2_E, async_copy_rows, barrier, mma_layout, reinterpret, wait_async_copies
from tokenmix_nha.ops.slot_window.hopper.backward_gqa import QueryTiles, add_slots_of_heads, add_window_of_heads
from tokenmix_nha.ops.slot_window.hopper.gates import (
    as_left,
    async_copy_tokens,
    enter_weight,
    load_gates,
    locate_keys,
    mma_add_opaque,
    mma_opaque,
    rounded,
    store,
    sums_of_rows,
)
from tokenmix_nha.ops.slot_window.hopper.pairs import (
    QueryWindow,
    WindowPointers,
    WindowTiles,
    add_window,
    load_vectors,
    softmax,
)
from tokenmix_nha.ops.slot_window.tile import Chunks
from tokenmix_nha.ops.slot_window.types import Backward, SlotGradients, Softmax


@cached_launch
@gluon.jit(do_not_specialize=["N", "chunks", "entries"])
def hopper_backward_keys_kernel(
    q, k, v, f, q_slots, splits, end, ds_k, ds_v, start, cu_seqlens, lse, delta, do, p, dz, dk, dk_slots, dv,
    scale, T, N, H, before, window, chunks, entries,
    M: gl.constexpr, SLOTS, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, OWN_SLOT_KEYS: gl.constexpr,
):  # fmt: skip
    """Store dk, and dk_slots if OWN_SLOT_KEYS, `[BT, K]`, and dv `[BT, V]` of a key chunk."""
    BT: gl.constexpr = 64
    BN: gl.constexpr = 32
    dtype: gl.constexpr = q.dtype.element_ty
    square: gl.constexpr = mma_layout(BT, 4)
    slots: gl.constexpr = mma_layout(M, 4)
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    i_h, HQ = gl.program_id(0) % H, H * GROUP
    first, keys, oldest, length, count, entry, begin_k, begin_q = locate_keys(
        gl.program_id(0) // H, i_h, Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries),
        GROUP,
    )  # fmt: skip
    if count != 0:
        return
    # the CTA's 64 queries lie `window` tokens after its keys: for query r, keys ≤ r have left the window and are seen
    # through the slots, and keys > r are still in the window
    o_q, entering = first + window - before, keys - window
    # the sequence's last `window` keys never leave the window; a chunk with only such keys loads no slot gradients
    size_k, size_v = gl.where(first < entering, K, 0), gl.where(first < entering, V, 0)

    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_v = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_do = gl.allocate_shared_memory(dtype, [BT, V], shared)
    # this buffer first contains p and dz, later queries (and do) for the window's part of the gradients
    s_y = gl.allocate_shared_memory(dtype, [2, BT, 64 if GROUP > 1 else M], shared)
    s_p, s_dz = reinterpret(s_y.index(0), dtype, [BT, M], swizzled), reinterpret(s_y.index(1), dtype, [BT, M], swizzled)
    s_dsk = gl.allocate_shared_memory(dtype, [K, M], swizzled)
    s_dsv = gl.allocate_shared_memory(dtype, [V, M], swizzled)
    p_k, p_q, p_do = k + begin_k * K, q + begin_q * K, do + begin_q * V
    p_qs = p_q
    if OWN_SLOT_KEYS:
        p_qs = q_slots + begin_q * K
    async_copy_tokens(s_q, p_qs, o_q, 0, length, HQ * K)
    async_copy_tokens(s_k, p_k, first, oldest, keys, H * K)
    async_copy_tokens(s_v, v + begin_k * V, first, oldest, keys, H * V)
    async_copy_tokens(s_do, p_do, o_q, 0, length, HQ * V)
    async_copy.commit_group()
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    o_r = gl.arange(0, BT, gl.SliceLayout(1, slots))
    m_e = (first + o_r >= oldest) & (first + o_r < entering)
    b_f = load_gates(f, begin_k, first + o_r, m_e, H, SLOTS, M)
    end_m, lse_t, delta_t = load_vectors(end, lse, delta, entry, begin_q, o_q, length, size_k, HQ, M)
    b_col = gl.exp2(-sums_of_rows(gl.maximum(b_f * LOG2_E, -14.0), s_p, s_dz, False))
    async_copy_tokens(s_p, p + begin_q * M, o_q, 0, length, HQ * M)
    async_copy_tokens(s_dz, dz + begin_q * M, o_q, 0, length, HQ * M)
    async_copy.commit_group()
    async_copy_rows(s_dsk, ds_k + entry * K * M, M, size_k, 4)
    async_copy_rows(s_dsv, ds_v + entry * V * M, M, size_v, 4)
    async_copy.commit_group()
    b_col *= enter_weight(b_f)
    b_weight = rounded(b_col * gl.convert_layout(end_m, gl.SliceLayout(0, slots))[None, :], dtype)
    b_col = as_left(rounded(b_col, dtype), BT)

    # masks [token, query]: m_p if the query sees the token through the slots, m_w if it sees it in the window
    wait_async_copies(1)
    if GROUP == 1:
        b_p, b_dz = mma_opaque(b_col, s_p.permute((1, 0)), BT), mma_opaque(b_col, s_dz.permute((1, 0)), BT)
    m_p = o_i[:, None] <= o_j[None, :]
    m_w = (o_i[:, None] > o_j[None, :]) & (o_i[:, None] <= o_j[None, :] + window)
    m_w = m_w & (first + o_i >= oldest)[:, None]
    # the window's queries begin at the chunk's first token, and overwrite buffers that the WGMMAs have read
    o_w = first - before
    shift_0, shift_1 = gl.maximum(-o_w, 0) // BN * BN, gl.minimum(window, keys - first)
    queries = QueryWindow(o_w, shift_0, shift_1, window, length, first, oldest, HQ, scale)
    if GROUP > 1:
        wait_async_copies(0)
        b_wv, b_wk = as_left(b_weight, V), as_left(b_weight, K)
        b_dv, b_dk = mma_opaque(b_wv, s_dsv.permute((1, 0)), V), mma_opaque(b_wk, s_dsk.permute((1, 0)), K)
        b_dv, b_dk, b_wv, b_wk = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_wv, b_wk])
        b_dk, b_dv = add_slots_of_heads(
            b_dk, b_dv, b_col, QueryTiles(s_q, s_do, s_p, s_dz),
            QueryTiles(p_qs, p_do, p + begin_q * M, dz + begin_q * M), o_q, length, HQ, GROUP,
        )  # fmt: skip
        barrier()
        s_qw = reinterpret(s_y, dtype, [BT, K], shared)
        s_qn, s_don = reinterpret(s_dsk, dtype, [BN, K], shared), reinterpret(s_dsv, dtype, [BN, V], shared)
        async_copy_tokens(s_qw, p_q + (GROUP - 1) * K, o_q, 0, length, HQ * K, True)
        async_copy.commit_group()
        async_copy_tokens(s_qn, p_q + (GROUP - 1) * K, o_w + shift_0, 0, length, HQ * K)
        async_copy_tokens(s_don, p_do + (GROUP - 1) * V, o_w + shift_0, 0, length, HQ * V)
        async_copy.commit_group()
        if OWN_SLOT_KEYS:
            s_q.store(b_dk.to(dtype))
            barrier()
            store(s_q, dk_slots + begin_k * K, first, 0, keys, H * K)
            b_dk = gl.zeros([BT, K], gl.float32, mma_layout(K, 4))
        b_dk, b_dv = add_window_of_heads(
            b_dk, b_dv, s_qw, s_do, WindowTiles(s_k, s_v, s_qn, s_don),
            WindowPointers(p_q, p_do, lse + begin_q, delta + begin_q), queries, o_q, GROUP,
        )  # fmt: skip
    elif OWN_SLOT_KEYS:
        b_p, b_dz, b_col = warpgroup_mma_wait(0, deps=[b_p, b_dz, b_col])
        b_p, b_dz = rounded(gl.where(m_p, b_p, 0.0), dtype), rounded(gl.where(m_p, b_dz, 0.0), dtype)
        barrier()
        s_qw = reinterpret(s_y, dtype, [BT, K], shared)
        s_qn, s_don = reinterpret(s_dsk, dtype, [BN, K], shared), reinterpret(s_dsv, dtype, [BN, V], shared)
        async_copy_tokens(s_qw, p_q, o_q, 0, length, HQ * K)
        async_copy.commit_group()
        wait_async_copies(1)
        b_p, b_dz, b_wv, b_wk = as_left(b_p, V), as_left(b_dz, K), as_left(b_weight, V), as_left(b_weight, K)
        b_dk = mma_add_opaque(b_dz, s_q, mma_opaque(b_wk, s_dsk.permute((1, 0)), K))
        b_dv = mma_add_opaque(b_p, s_do, mma_opaque(b_wv, s_dsv.permute((1, 0)), V))
        b_dv, b_dk, b_p, b_dz, b_wv, b_wk = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz, b_wv, b_wk])
        barrier()
        s_q.store(b_dk.to(dtype))
        async_copy_tokens(s_qn, p_q, o_w + shift_0, 0, length, HQ * K)
        async_copy_tokens(s_don, p_do, o_w + shift_0, 0, length, HQ * V)
        async_copy.commit_group()
        wait_async_copies(1)
        store(s_q, dk_slots + begin_k * K, first, 0, keys, H * K)
        b_s, b_ds = mma_opaque(s_k, s_qw.permute((1, 0)), BT), mma_opaque(s_v, s_do.permute((1, 0)), BT)
        b_s, b_ds = warpgroup_mma_wait(0, deps=[b_s, b_ds])
        b_s, b_ds = softmax(b_s, b_ds, gl.convert_layout(lse_t, col), gl.convert_layout(delta_t, col), m_w, scale)
        b_p, b_dz = as_left(b_s.to(dtype), V), as_left(b_ds.to(dtype), K)
        b_dv = mma_add_opaque(b_p, s_do, b_dv)
        b_dk = mma_opaque(b_dz, s_qw, K)
        b_dv, b_dk, b_p, b_dz = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz])
    else:
        b_s, b_ds = mma_opaque(s_k, s_q.permute((1, 0)), BT), mma_opaque(s_v, s_do.permute((1, 0)), BT)
        b_s, b_ds, b_p, b_dz, b_col = warpgroup_mma_wait(0, deps=[b_s, b_ds, b_p, b_dz, b_col])
        b_s, b_ds = softmax(b_s, b_ds, gl.convert_layout(lse_t, col), gl.convert_layout(delta_t, col), m_w, scale)
        b_p, b_dz = rounded(gl.where(m_p, b_p, b_s), dtype), rounded(gl.where(m_p, b_dz, b_ds), dtype)
        barrier()
        s_qn, s_don = reinterpret(s_p, dtype, [BN, K], shared), reinterpret(s_dz, dtype, [BN, V], shared)
        async_copy_tokens(s_qn, p_q, o_w + shift_0, 0, length, HQ * K)
        async_copy_tokens(s_don, p_do, o_w + shift_0, 0, length, HQ * V)
        async_copy.commit_group()
        wait_async_copies(1)
        b_p, b_dz, b_wv, b_wk = as_left(b_p, V), as_left(b_dz, K), as_left(b_weight, V), as_left(b_weight, K)
        b_dv = mma_add_opaque(b_p, s_do, mma_opaque(b_wv, s_dsv.permute((1, 0)), V))
        b_dk = mma_add_opaque(b_dz, s_q, mma_opaque(b_wk, s_dsk.permute((1, 0)), K))
        b_dv, b_dk, b_p, b_dz, b_wv, b_wk = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz, b_wv, b_wk])
    if GROUP == 1:
        b_dk, b_dv = add_window(
            b_dk, b_dv, WindowTiles(s_k, s_v, s_qn, s_don),
            WindowPointers(p_q, p_do, lse + begin_q, delta + begin_q), queries,
        )  # fmt: skip
    barrier()
    s_do.store(b_dv.to(dtype))
    s_q.store(b_dk.to(dtype))
    barrier()
    store(s_do, dv + begin_k * V, first, 0, keys, H * V)
    store(s_q, dk + begin_k * K, first, 0, keys, H * K)
    async_copy.wait_group(0)


def hopper_key_gradients(launch, b: Backward, softmax: Softmax, slots: SlotGradients) -> None:
    """Fill dk, dk_slots and dv for the weak chunks, in which no slot decays by more than 80 bits."""
    x, y, saved = b.x, b.y, b.saved
    launch(
        hopper_backward_keys_kernel, (y.key_chunks * y.rows * y.H,),
        q=x.q, k=x.k, v=x.v, f=x.f, q_slots=x.q_slots, splits=saved.splits, end=saved.end, **slots._asdict(),
        start=x.start, cu_seqlens=x.cu_seqlens, lse=saved.lse, delta=softmax.delta, do=b.do, p=softmax.p, dz=softmax.dz,
        dk=b.grads.dk, dk_slots=b.grads.dk_slots, dv=b.grads.dv, scale=x.scale, **y.of_keys, **y.tile, GROUP=y.GROUP,
        OWN_SLOT_KEYS=x.k_slots is not None, num_warps=4,
    )  # fmt: skip
