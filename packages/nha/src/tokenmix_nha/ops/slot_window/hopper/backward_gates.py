"""Hopper kernel of the log-gate gradients of a weak chunk. Tiles are transposed, `[token, query]`.

A chunk is weak if no slot decays by more than 80 bits in it. A CTA is one warpgroup. Each buffer is one pipeline stage;
later loads reuse buffers after a barrier:

    cp.async  k̂, q̂, v, do ── p, dz ── dS^K, dS^V   S^K, S^V, into the buffers of q̂ and do
    WGMMA     A = k̂ q̂ᵀ, B = v doᵀ                  e = A dz + B p; at the chunk's end e' = k̂ dS^K + v dS^V
    WGMMA     sums of x − e from a token on        + ⟨dS, S⟩ − own terms → df

k̂, q̂: keys and queries of the slots S; other letters as in README.md, "Backward".
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import LOG2_E, async_copy_rows, barrier, mma_layout, reinterpret, wait_async_copies
from tokenmix_nha.ops.slot_window.hopper import gates
from tokenmix_nha.ops.slot_window.hopper.backward_gqa import QueryTiles, entries_of_heads
from tokenmix_nha.ops.slot_window.tile import Chunks
from tokenmix_nha.ops.slot_window.types import Backward, SlotGradients, Softmax


@cached_launch
@gluon.jit(do_not_specialize=["N", "chunks", "entries"])
def hopper_backward_gates_kernel(
    q, k, v, f, splits, end, states_k, states_v, ds_k, ds_v, start, cu_seqlens, do, p, dz, x, df,
    T, N, H, before, window, chunks, entries,
    M: gl.constexpr, SLOTS, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Store df_j = ⟨dS_j, α_j (S_{j−1} − (k̂_j, v_j))⟩ `[BT, M]` of a weak chunk's tokens; README.md derives it."""
    BT: gl.constexpr = 64
    dtype: gl.constexpr = v.dtype.element_ty
    square: gl.constexpr = mma_layout(BT, 4)
    slots: gl.constexpr = mma_layout(M, 4)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    i_h, HQ = gl.program_id(0) % H, H * GROUP
    first, keys, oldest, length, count, entry, begin_k, begin_q = gates.locate_keys(
        gl.program_id(0) // H, i_h, Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries),
        GROUP,
    )  # fmt: skip
    if count != 0:
        return
    # the chunk's queries lie `window` tokens after its keys: query r sees keys ≤ r in the slots, keys > r in its window
    o_q, entering = first + window - before, keys - window
    o_i, o_m = gl.arange(0, BT, gl.SliceLayout(1, slots)), gl.arange(0, M, gl.SliceLayout(0, slots))
    m_m = (o_m < SLOTS)[None, :]
    o_f = ((begin_k + (first + o_i).to(gl.int64) * H) * SLOTS)[:, None] + o_m[None, :]
    if first >= entering:
        b_df = gl.zeros([BT, M], gl.float32, slots)
        gl.store(df + o_f, b_df.to(df.dtype.element_ty), mask=(first + o_i < keys)[:, None] & m_m)
        return

    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_v = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_do = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_dz = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_dsk = gl.allocate_shared_memory(dtype, [K, M], swizzled)
    s_dsv = gl.allocate_shared_memory(dtype, [V, M], swizzled)
    gates.async_copy_tokens(s_k, k + begin_k * K, first, oldest, keys, H * K)
    gates.async_copy_tokens(s_q, q + begin_q * K, o_q, 0, length, HQ * K)
    gates.async_copy_tokens(s_v, v + begin_k * V, first, oldest, keys, H * V)
    gates.async_copy_tokens(s_do, do + begin_q * V, o_q, 0, length, HQ * V)
    async_copy.commit_group()
    m_e = (first + o_i >= oldest) & (first + o_i < entering)
    b_f = gates.load_gates(f, begin_k, first + o_i, m_e, H, SLOTS, M)
    b_inverse = gl.exp2(-gates.sums_of_rows(gl.maximum(b_f * LOG2_E, -14.0), s_p, s_dz, False))
    gates.async_copy_tokens(s_p, p + begin_q * M, o_q, 0, length, HQ * M)
    gates.async_copy_tokens(s_dz, dz + begin_q * M, o_q, 0, length, HQ * M)
    async_copy.commit_group()
    async_copy_rows(s_dsk, ds_k + entry * K * M, M, K, 4)
    async_copy_rows(s_dsv, ds_v + entry * V * M, M, V, 4)
    async_copy.commit_group()

    wait_async_copies(1)
    if GROUP > 1:
        b_e = entries_of_heads(
            s_k, s_v, QueryTiles(s_q, s_do, s_p, s_dz),
            QueryTiles(q + begin_q * K, do + begin_q * V, p + begin_q * M, dz + begin_q * M), o_q, length, HQ, GROUP,
        )  # fmt: skip
        wait_async_copies(0)
        b_last = gates.mma_add_opaque(s_v, s_dsv, gates.mma_opaque(s_k, s_dsk, M))
        b_last = warpgroup_mma_wait(0, deps=[b_last])
    else:
        b_a, b_dp = gates.mma_opaque(s_k, s_q.permute((1, 0)), BT), gates.mma_opaque(s_v, s_do.permute((1, 0)), BT)
        b_a, b_dp = warpgroup_mma_wait(0, deps=[b_a, b_dp])
        m_p = (
            gl.arange(0, BT, gl.SliceLayout(1, square))[:, None] <= gl.arange(0, BT, gl.SliceLayout(0, square))[None, :]
        )
        b_a = gates.as_left(gates.rounded(gl.where(m_p, b_a, 0.0), dtype), M)
        b_dp = gates.as_left(gates.rounded(gl.where(m_p, b_dp, 0.0), dtype), M)
        b_e = gates.mma_add_opaque(b_dp, s_p, gates.mma_opaque(b_a, s_dz, M))
        wait_async_copies(0)
        b_last = gates.mma_add_opaque(s_v, s_dsv, gates.mma_opaque(s_k, s_dsk, M))
        b_e, b_last, b_a, b_dp = warpgroup_mma_wait(0, deps=[b_e, b_last, b_a, b_dp])
    barrier()
    # the slots before the chunk overwrite the buffers of q and do
    s_sk, s_sv = reinterpret(s_q, dtype, [K, M], swizzled), reinterpret(s_do, dtype, [V, M], swizzled)
    async_copy_rows(s_sk, states_k + entry * K * M, M, K, 4)
    async_copy_rows(s_sv, states_v + entry * V * M, M, V, 4)
    async_copy.commit_group()

    o_l = gl.arange(0, M, line)
    end_m = gl.exp2(gl.load(end + entry * M + o_l))
    b_last *= gl.convert_layout(end_m, gl.SliceLayout(0, slots))[None, :]
    b_col = gates.enter_weight(b_f) * b_inverse
    # infinity marks a clamped gate, whose gradient is 0; `store_gates` replaces it by 0
    b_own = gl.where(b_f * LOG2_E >= -14.0, (b_inverse - b_col) * (b_e + b_last), float("inf"))
    b_last *= b_col
    p_x = x + ((begin_q + (o_q + o_i).to(gl.int64) * HQ) * M)[:, None] + o_m[None, :]
    # if the window is shorter than in the preceding call, the first tokens have no query that reads them
    m_x = ((o_q + o_i >= 0) & (o_q + o_i < length))[:, None]
    b_x = gl.load(p_x, mask=m_x, other=0.0)
    for i_g in range(1, GROUP):
        b_x += gl.load(p_x + i_g * M, mask=m_x, other=0.0)
    b_x = gl.where(m_e[:, None], b_x - b_e * gates.rounded(b_col, dtype).to(gl.float32) - b_last, 0.0)
    rest_m = gl.convert_layout(gl.sum(b_last, 0), line)
    b_df = gates.sums_of_rows(b_x, s_p, s_dz, True) - b_own
    wait_async_copies(0)
    rest_m += end_m * gl.convert_layout(gates.column_dots(s_dsk, s_sk) + gates.column_dots(s_dsv, s_sv), line)
    b_df += gl.convert_layout(rest_m, gl.SliceLayout(0, slots))[None, :]
    gates.store_gates(df, b_df, begin_k, first, oldest, entering, keys, H, SLOTS)


def hopper_gate_gradients(launch, b: Backward, softmax: Softmax, slots: SlotGradients) -> None:
    """Fill df for the weak chunks, in which no slot decays by more than 80 bits."""
    x, y, saved = b.x, b.y, b.saved
    launch(
        hopper_backward_gates_kernel, (y.key_chunks * y.rows * y.H,),
        q=x.q if x.q_slots is None else x.q_slots, k=x.k if x.k_slots is None else x.k_slots, v=x.v, f=x.f,
        splits=saved.splits, end=saved.end, states_k=saved.states_k, states_v=saved.states_v, **slots._asdict(),
        start=x.start, cu_seqlens=x.cu_seqlens, do=b.do, p=softmax.p, dz=softmax.dz, x=softmax.x, df=b.grads.df,
        **y.of_keys, **y.tile, GROUP=y.GROUP, num_warps=4,
    )  # fmt: skip
