"""Hopper kernel of the key, value and log-gate gradients of a weak chunk with at most 32 slots.

With 64 slots the tiles would not fit in shared memory. Tiles are transposed, `[token, query]`. One warpgroup runs the
computation of `backward_gates.py`, then that of `backward_keys.py`, with the letters of their docstrings:

    cp.async  k, q, v, do ── p, dz, dS^K, dS^V ── S^K, S^V     q', do', into the buffers of S^K and S^V
    WGMMA     A = k qᵀ, B = v doᵀ   e, e' → df                 Ĉ pᵀ, Ĉ dzᵀ, A and B again → dv, dk, then the window
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import (
    LOG2_E,
    async_copy_rows,
    barrier,
    mma_layout,
    opaque,
    reinterpret,
    wait_async_copies,
)
from tokenmix_nha.ops.slot_window.hopper import gates
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
def hopper_backward_tokens_kernel(
    q, k, v, f, splits, end, states_k, states_v, ds_k, ds_v, start, cu_seqlens, lse, delta, do, p, dz, x, dk, dv, df,
    scale, T, N, H, before, window, chunks, entries,
    M: gl.constexpr, SLOTS, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Store dk `[BT, K]`, dv `[BT, V]` and df `[BT, M]` for the tokens of a chunk."""
    BT: gl.constexpr = 64
    BN: gl.constexpr = 32
    dtype: gl.constexpr = q.dtype.element_ty
    square: gl.constexpr = mma_layout(BT, 4)
    slots: gl.constexpr = mma_layout(M, 4)
    col: gl.constexpr = gl.SliceLayout(0, square)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    i_h = gl.program_id(0) % H
    first, keys, oldest, length, count, entry, begin_k, begin_q = gates.locate_keys(
        gl.program_id(0) // H, i_h, Chunks(splits, start, cu_seqlens, T, N, H, before, window, chunks, entries),
    )  # fmt: skip
    if count != 0:
        return
    # the chunk's queries lie `window` tokens after its keys: query r sees keys ≤ r in the slots, keys > r in its window
    o_q, entering = first + window - before, keys - window
    # the sequence's last `window` keys never leave the window; a chunk with only such keys loads no slot gradients
    size_k, size_v = gl.where(first < entering, K, 0), gl.where(first < entering, V, 0)

    s_k = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_q = gl.allocate_shared_memory(dtype, [BT, K], shared)
    s_v = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_do = gl.allocate_shared_memory(dtype, [BT, V], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_dz = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_dsk = gl.allocate_shared_memory(dtype, [K, M], swizzled)
    s_dsv = gl.allocate_shared_memory(dtype, [V, M], swizzled)
    # contents of these two buffers, one after another: operands of the gate sums, slots before the chunk, operands of
    # the sums for df, queries (and their do) whose windows reach tokens of the chunk
    s_sk = gl.allocate_shared_memory(dtype, [K, M], swizzled)
    s_sv = gl.allocate_shared_memory(dtype, [V, M], swizzled)
    s_high, s_low = reinterpret(s_sk, dtype, [BT, M], swizzled), reinterpret(s_sv, dtype, [BT, M], swizzled)
    p_k, p_q, p_do = k + begin_k * K, q + begin_q * K, do + begin_q * V
    gates.async_copy_tokens(s_k, p_k, first, oldest, keys, H * K)
    gates.async_copy_tokens(s_q, p_q, o_q, 0, length, H * K)
    gates.async_copy_tokens(s_v, v + begin_k * V, first, oldest, keys, H * V)
    gates.async_copy_tokens(s_do, p_do, o_q, 0, length, H * V)
    async_copy.commit_group()
    gates.async_copy_tokens(s_p, p + begin_q * M, o_q, 0, length, H * M)
    gates.async_copy_tokens(s_dz, dz + begin_q * M, o_q, 0, length, H * M)
    async_copy_rows(s_dsk, ds_k + entry * K * M, M, size_k, 4)
    async_copy_rows(s_dsv, ds_v + entry * V * M, M, size_v, 4)
    async_copy.commit_group()
    o_r, o_m = gl.arange(0, BT, gl.SliceLayout(1, slots)), gl.arange(0, M, gl.SliceLayout(0, slots))
    m_e = (first + o_r >= oldest) & (first + o_r < entering)
    b_f = gates.load_gates(f, begin_k, first + o_r, m_e, H, SLOTS, M)
    m_x = ((o_q + o_r >= 0) & (o_q + o_r < length))[:, None]
    p_x = x + ((begin_q + (o_q + o_r).to(gl.int64) * H) * M)[:, None] + o_m[None, :]
    end_m, lse_t, delta_t = load_vectors(end, lse, delta, entry, begin_q, o_q, length, size_k, H, M)
    b_inverse = gl.exp2(-gates.sums_of_rows(gl.maximum(b_f * LOG2_E, -14.0), s_high, s_low, False))
    async_copy_rows(s_sk, states_k + entry * K * M, M, size_k, 4)
    async_copy_rows(s_sv, states_v + entry * V * M, M, size_v, 4)
    async_copy.commit_group()
    b_x = gl.load(p_x, mask=m_x, other=0.0)
    b_col = gates.enter_weight(b_f) * b_inverse
    b_end = gl.convert_layout(end_m, gl.SliceLayout(0, slots))[None, :]
    b_weight = gates.rounded(b_col * b_end, dtype)

    # compute df, as in backward_gates.py
    wait_async_copies(1)
    b_a, b_dp = gates.mma_opaque(s_k, s_q.permute((1, 0)), BT), gates.mma_opaque(s_v, s_do.permute((1, 0)), BT)
    b_last = gates.mma_add_opaque(s_v, s_dsv, gates.mma_opaque(s_k, s_dsk, M))
    b_a, b_dp, b_last = warpgroup_mma_wait(0, deps=[b_a, b_dp, b_last])
    o_i, o_j = gl.arange(0, BT, gl.SliceLayout(1, square)), gl.arange(0, BT, col)
    m_p = o_i[:, None] <= o_j[None, :]
    b_left = gates.as_left(gates.rounded(gl.where(m_p, b_a, 0.0), dtype), M)
    b_right = gates.as_left(gates.rounded(gl.where(m_p, b_dp, 0.0), dtype), M)
    b_e = gates.mma_add_opaque(b_right, s_p, gates.mma_opaque(b_left, s_dz, M))
    b_e, b_left, b_right = warpgroup_mma_wait(0, deps=[b_e, b_left, b_right])
    b_last *= b_end
    # infinity marks a clamped gate, whose gradient is 0; `store_gates` replaces it by 0
    b_own = gl.where(b_f * LOG2_E >= -14.0, (b_inverse - b_col) * (b_e + b_last), float("inf"))
    b_last *= b_col
    b_round = gates.rounded(b_col, dtype)
    b_x = gl.where(m_e[:, None], b_x - b_e * b_round.to(gl.float32) - b_last, 0.0)
    rest_m = gl.convert_layout(gl.sum(b_last, 0), line)
    wait_async_copies(0)
    rest_m += end_m * gl.convert_layout(gates.column_dots(s_dsk, s_sk) + gates.column_dots(s_dsv, s_sv), line)
    barrier()
    b_df = gates.sums_of_rows(b_x, s_high, s_low, True) - b_own
    b_df += gl.convert_layout(rest_m, gl.SliceLayout(0, slots))[None, :]
    gates.store_gates(df, b_df, begin_k, first, oldest, entering, keys, H, SLOTS)

    # masks [token, query]: m_p if the query sees the token through the slots, m_w if it sees it in the window
    b_left = gates.as_left(b_round, BT)
    b_p, b_dz = gates.mma_opaque(b_left, s_p.permute((1, 0)), BT), gates.mma_opaque(b_left, s_dz.permute((1, 0)), BT)
    # compute A and B again instead of holding them, which saves registers
    b_a, b_dp = gates.mma_opaque(s_k, s_q.permute((1, 0)), BT), gates.mma_opaque(s_v, s_do.permute((1, 0)), BT)
    b_p, b_dz, b_a, b_dp, b_left = warpgroup_mma_wait(0, deps=[b_p, b_dz, b_a, b_dp, b_left])
    o_i, o_j = opaque(o_i), opaque(o_j)
    m_p = o_i[:, None] <= o_j[None, :]
    m_w = (o_i[:, None] > o_j[None, :]) & (o_i[:, None] <= o_j[None, :] + window)
    m_w = m_w & (first + o_i >= oldest)[:, None]
    b_a, b_dp = softmax(b_a, b_dp, gl.convert_layout(lse_t, col), gl.convert_layout(delta_t, col), m_w, scale)
    b_p, b_dz = gates.rounded(gl.where(m_p, b_p, b_a), dtype), gates.rounded(gl.where(m_p, b_dz, b_dp), dtype)
    barrier()
    # the window's queries begin at the chunk's first token
    s_qn, s_don = reinterpret(s_sk, dtype, [BN, K], shared), reinterpret(s_sv, dtype, [BN, V], shared)
    o_w = first - before
    shift_0, shift_1 = gl.maximum(-o_w, 0) // BN * BN, gl.minimum(window, keys - first)
    gates.async_copy_tokens(s_qn, p_q, o_w + shift_0, 0, length, H * K)
    gates.async_copy_tokens(s_don, p_do, o_w + shift_0, 0, length, H * V)
    async_copy.commit_group()
    b_p, b_dz, b_wv, b_wk = (
        gates.as_left(b_p, V),
        gates.as_left(b_dz, K),
        gates.as_left(b_weight, V),
        gates.as_left(b_weight, K),
    )
    b_dv = gates.mma_add_opaque(b_p, s_do, gates.mma_opaque(b_wv, s_dsv.permute((1, 0)), V))
    b_dk = gates.mma_add_opaque(b_dz, s_q, gates.mma_opaque(b_wk, s_dsk.permute((1, 0)), K))
    b_dv, b_dk, b_p, b_dz, b_wv, b_wk = warpgroup_mma_wait(0, deps=[b_dv, b_dk, b_p, b_dz, b_wv, b_wk])
    b_dk, b_dv = add_window(
        b_dk, b_dv, WindowTiles(s_k, s_v, s_qn, s_don), WindowPointers(p_q, p_do, lse + begin_q, delta + begin_q),
        QueryWindow(o_w, shift_0, shift_1, window, length, first, oldest, H, scale),
    )  # fmt: skip
    barrier()
    s_do.store(b_dv.to(dtype))
    s_q.store(b_dk.to(dtype))
    barrier()
    gates.store(s_do, dv + begin_k * V, first, 0, keys, H * V)
    gates.store(s_q, dk + begin_k * K, first, 0, keys, H * K)
    async_copy.wait_group(0)


def hopper_token_gradients(launch, b: Backward, softmax: Softmax, slots: SlotGradients) -> None:
    """Fill dk, dv and df for weak chunks (`tile.py`); slots and window must use the same keys, and GROUP must be 1."""
    x, y, saved = b.x, b.y, b.saved
    launch(
        hopper_backward_tokens_kernel, (y.key_chunks * y.rows * y.H,),
        q=x.q, k=x.k, v=x.v, f=x.f, splits=saved.splits, end=saved.end, states_k=saved.states_k,
        states_v=saved.states_v,
        **slots._asdict(), start=x.start, cu_seqlens=x.cu_seqlens, lse=saved.lse, do=b.do, **softmax._asdict(),
        dk=b.grads.dk, dv=b.grads.dv, df=b.grads.df, scale=x.scale, **y.of_keys, **y.tile, num_warps=4,
    )  # fmt: skip
