"""`forward` on Hopper: states and outputs, a sequence or a segment of one, a value head and 64 columns a program."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops.gated_delta_rule.hopper.tiles import (
    causal_decay_transposed,
    fetch_rows,
    load_gates,
    locate_chunk,
    product,
    rows_of,
    store_rows,
)
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, SIZES, sequences
from tokenmix_core.tile.launch import cached_launch


@cached_launch
@gluon.jit(do_not_specialize=[*SIZES, "segment"])
def forward_kernel(
    q, k, v, inverse, gates, initial_state, entering, cu_seqlens, o, final_state, residual, states,
    scale, T, N, H, group, tokens, segment,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr, OUTPUT: gl.constexpr, SAVE: gl.constexpr,
    SPLIT: gl.constexpr, INITIAL: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """S is held transposed, `[V, K]`, 16 rows a warp, so that every matrix that depends on it is a left operand, from registers.

    Vectors by row are `x_i`, by column `x_j`. With OUTPUT outputs and final states; with SAVE, for the backward pass, R and
    the state entering each chunk. With SPLIT a program runs through one segment, from the state that enters it.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    tile: gl.constexpr = product(K, WARPS)
    flat: gl.constexpr = product(BT, WARPS)
    # P' is shared out among all warps: a warp group for each part of its columns
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BT * 4 // WARPS, 16])
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    flat_col: gl.constexpr = gl.SliceLayout(0, flat)
    left: gl.constexpr = gl.DotOperandLayout(0, flat, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    HV = H * group
    i_sh = gl.program_id(0)
    i_hv = i_sh % HV
    i_n, begin, length, first = locate_chunk(i_sh // HV, T, segment, N, cu_seqlens, PACKED)
    # an empty sequence has a segment too, which hands its state on
    if (first >= length) & (first > 0):
        return
    end = gl.minimum(first + segment, length)
    if PACKED:
        slot = begin // BT + i_n
    else:
        slot = i_n.to(gl.int64) * gl.cdiv(T, BT)
    s_qk, s_vo, s_at = H * K, HV * V, HV * BT
    p_k, p_q = k + (begin * H + i_hv // group) * K, q + (begin * H + i_hv // group) * K
    o_vo = (begin * HV + i_hv) * V
    p_a = inverse + (begin * HV + i_hv) * BT
    # an empty sequence may begin past the last token
    p_gates = gates + (i_hv.to(gl.int64) * tokens + gl.minimum(begin, tokens - 1)) * 4
    p_s = states + (slot * HV + i_hv) * K * V

    k_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    q_2 = gl.allocate_shared_memory(dtype, [2, BT, K] if OUTPUT else [2, 8, 64], shared)
    a_2 = gl.allocate_shared_memory(dtype, [2, BT, BT], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, V], shared)
    # for S, then R, on their way out, and O
    s_s = gl.allocate_shared_memory(dtype, [K if SAVE else BT, V], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_r = s_s.slice(0, BT)
    s_o = s_s.slice(K - BT if SAVE else 0, BT)
    s_gates = gl.allocate_shared_memory(gl.float32, [4, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    g_b, g_w, g_r, g_q = s_gates.index(0), s_gates.index(1), s_gates.index(2), s_gates.index(3)

    o_v, o_k = gl.arange(0, V, gl.SliceLayout(1, tile)), gl.arange(0, K, gl.SliceLayout(0, tile))
    o_tile = o_k[None, :] * V + o_v[:, None]
    o_state = (i_n.to(gl.int64) * HV + i_hv) * K * V + o_tile
    b_s = gl.zeros([V, K], gl.float32, tile)
    if INITIAL:
        if first == 0:
            b_s = gl.load(initial_state + o_state)
    if SPLIT:
        if first > 0:
            b_s = gl.load(entering + i_sh.to(gl.int64) * K * V + o_tile)
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    zero, zero_p = gl.zeros([V, BT], gl.float32, flat), gl.zeros([BT, BT], gl.float32, square)

    row_0 = first.to(gl.int64)
    fetch_rows(k_2.index(0), p_k + row_0 * s_qk, s_qk, length - first, WARPS)
    if OUTPUT:
        fetch_rows(q_2.index(0), p_q + row_0 * s_qk, s_qk, length - first, WARPS)
    fetch_rows(a_2.index(0), p_a + row_0 * s_at, s_at, length - first, WARPS)
    fetch_rows(v_2.index(0), v + o_vo + row_0 * s_vo, s_vo, length - first, WARPS)
    async_copy.commit_group()
    b_b, b_w, b_r, b_last = load_gates(p_gates, first, length, line)
    for i in range(gl.cdiv(end - first, BT)):
        token = first + i * BT
        here, then = i % 2, (i + 1) % 2
        s_k, s_q, s_a, s_v = k_2.index(here), q_2.index(here), a_2.index(here), v_2.index(here)
        last = b_last
        g_b.store(b_b)
        g_w.store(b_w)
        g_r.store(b_r)
        async_copy.wait_group(0)
        if token + BT < end:
            row_1, rows = token.to(gl.int64) + BT, length - token - BT
            fetch_rows(k_2.index(then), p_k + row_1 * s_qk, s_qk, rows, WARPS)
            if OUTPUT:
                fetch_rows(q_2.index(then), p_q + row_1 * s_qk, s_qk, rows, WARPS)
            fetch_rows(a_2.index(then), p_a + row_1 * s_at, s_at, rows, WARPS)
            fetch_rows(v_2.index(then), v + o_vo + row_1 * s_vo, s_vo, rows, WARPS)
            async_copy.commit_group()
        b_b, b_w, b_r, b_last = load_gates(p_gates, token + BT, length, line)

        b_h = gl.convert_layout(b_s.to(dtype), left)
        b_y = warpgroup_mma(b_h, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUTPUT:
            b_p = warpgroup_mma(s_k, s_q.permute((1, 0)), zero_p, use_acc=False, is_async=True)
            if L2NORM:
                b_q = s_q.load(rows_of(K, WARPS)).to(gl.float32)
                g_q.store(gl.rsqrt(gl.sum(b_q * b_q, 1) + 1e-6) * scale)
        if SAVE:
            s_s.permute((1, 0)).store(b_s.to(dtype))
            store_rows(p_s + (token // BT).to(gl.int64) * HV * K * V, s_s, V, K, WARPS)

        # R = Ã (V − γ ⊙ K S)
        b_j = g_b.load(flat_col)
        b_v = s_v.permute((1, 0)).load(flat).to(gl.float32)
        if OUTPUT:
            b_y, b_p = warpgroup_mma_wait(0, deps=[b_y, b_p])
            b_o = warpgroup_mma(b_h, s_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        else:
            b_y, b_h = warpgroup_mma_wait(0, deps=[b_y, b_h])
        b_y = gl.convert_layout((b_v - b_y * (gl.exp2(b_j) * g_r.load(flat_col))[None, :]).to(dtype), left)
        b_rt = warpgroup_mma(b_y, s_a.permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUTPUT:
            b_p *= causal_decay_transposed(g_b.load(row), g_b.load(col), o_i, o_j) * g_w.load(row)[:, None]
            s_p.store(b_p.to(dtype))
            fence_async_shared()
            b_rt, b_y, b_o, b_h = warpgroup_mma_wait(0, deps=[b_rt, b_y, b_o, b_h])
        else:
            b_rt, b_y = warpgroup_mma_wait(0, deps=[b_rt, b_y])

        # S ← 2^b_last S + Kᵀ (2^(b_last − b) β ⊙ R)
        b_rw = gl.convert_layout((b_rt * (gl.exp2(last - b_j) * g_w.load(flat_col))[None, :]).to(dtype), left_k)
        b_s = warpgroup_mma(b_rw, s_k, b_s * gl.exp2(last), is_async=True)
        if OUTPUT:
            b_ro = gl.convert_layout(b_rt.to(dtype), left)
            b_o = warpgroup_mma(b_ro, s_p, b_o * gl.exp2(b_j)[None, :], is_async=True)
        o_rows = o_vo + token.to(gl.int64) * s_vo
        if SAVE:
            s_r.permute((1, 0)).store(b_rt.to(dtype))
            store_rows(residual + o_rows, s_r, s_vo, length - token, WARPS)

        # O = scale (γ ⊙ Q S + P' R)
        if OUTPUT:
            b_s, b_o, b_rw, b_ro = warpgroup_mma_wait(0, deps=[b_s, b_o, b_rw, b_ro])
            if L2NORM:
                b_o *= g_q.load(flat_col)[None, :]
            else:
                b_o *= scale
            s_o.permute((1, 0)).store(b_o.to(dtype))
            store_rows(o + o_rows, s_o, s_vo, length - token, WARPS)
        else:
            b_s, b_rw = warpgroup_mma_wait(0, deps=[b_s, b_rw])

    if OUTPUT:
        if end >= length:
            gl.store(final_state + o_state, b_s)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    gates: Tensor,
    entering: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    segment: int,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write outputs and final states, and R and the state of each chunk, unless these are empty, into `out`.

    Sequences are split into segments of `segment` tokens, unless that is 0.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    tokens = segment or -(-T // CHUNK) * CHUNK
    slots = chunk_slots(B, T, tokens, cu_seqlens)
    o, _, residual, _ = out
    forward_kernel[(slots * HV,)](
        q, k, v, inverse, gates, gates if initial_state is None else initial_state, entering, cu_seqlens, *out,
        scale, T, sequences(q, cu_seqlens), H, HV // H, B * T, tokens,
        K, V, CHUNK, V // 16, len(o) > 0, len(residual) > 0, segment > 0, initial_state is not None, qk_l2norm,
        cu_seqlens is not None, num_warps=V // 16,
    )  # fmt: skip
