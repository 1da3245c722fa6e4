"""`forward` on Hopper: a sequence or segment, a head and BV columns of the state a program."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.ops.ssd.hopper.decay import cumulative_decay, load_decay
from tokenmix_core.tile.hopper import (
    await_copies,
    barrier,
    causal_decay,
    fetch_rows,
    locate_chunk,
    product_layout,
    store_rows,
)
from tokenmix_core.tile.launch import cached_launch


@gluon.jit
def sequence_span(i_n, T, cu_seqlens, PACKED: gl.constexpr):
    """As `tile.sequences.sequence_span`: a sequence's first row and length."""
    if PACKED:
        begin = gl.load(cu_seqlens + i_n).to(gl.int64)
        length = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - begin).to(gl.int32)
    else:
        begin, length = i_n.to(gl.int64) * T, T
    return begin, length


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def hopper_forward_kernel(
    q, k, v, g, o, initial_state, final_state, cu_seqlens,
    stride_q, stride_k, stride_v, scale, T, N, G, HV, segment,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr,
    SEGMENTED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The state is held transposed, `[BV, K]`, 16 rows a warp: what depends on it is a left operand, from registers.

    Vectors by row are `x_i`, by column `x_j`; strides count 16 bytes.
    """
    BT: gl.constexpr = 64
    W: gl.constexpr = BV // 16
    dtype: gl.constexpr = q.dtype.element_ty
    tile: gl.constexpr = product_layout(K, W)
    flat: gl.constexpr = product_layout(BT, W)
    # P is shared out among all warps: a warp group for each part of its columns
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BT * 4 // W, 16])
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    left: gl.constexpr = gl.DotOperandLayout(0, flat, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    i_v = gl.program_id(0) % (V // BV)
    i_h = gl.program_id(0) // (V // BV) % HV
    i_s = gl.program_id(0) // (V // BV) // HV
    if SEGMENTED:
        _, begin, length, start = locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED, W)
        if start >= length:
            return
        length = gl.minimum(length - start, segment)
        begin = begin + start
    else:
        begin, length = sequence_span(i_s, T, cu_seqlens, PACKED)
    # rows begin at multiples of 16 bytes
    stride_q, stride_k, stride_v = stride_q * 8, stride_k * 8, stride_v * 8
    i_g = i_h // (HV // G)
    p_q, p_k = q + begin * stride_q + i_g * K, k + begin * stride_k + i_g * K
    p_v, p_o = v + begin * stride_v + i_h * V + i_v * BV, o + (begin * HV + i_h) * V + i_v * BV
    p_g = g + begin * HV + i_h

    q_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    k_2 = gl.allocate_shared_memory(dtype, [2, BT, K], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, BV], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_o = gl.allocate_shared_memory(dtype, [BT, BV], shared)
    fetch_rows(q_2.index(0), p_q, stride_q, length, W)
    fetch_rows(k_2.index(0), p_k, stride_k, length, W)
    fetch_rows(v_2.index(0), p_v, stride_v, length, W)
    async_copy.commit_group()
    b_g = load_decay(p_g, HV, length)

    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    o_v, o_k = gl.arange(0, BV, gl.SliceLayout(1, tile)), gl.arange(0, K, gl.SliceLayout(0, tile))
    o_state = (i_s.to(gl.int64) * HV + i_h) * K * V + i_v * BV
    o_state = o_state + o_k[None, :] * V + o_v[:, None]
    b_s = gl.load(initial_state + o_state) if INITIAL else gl.zeros([BV, K], gl.float32, tile)
    zero_p = gl.zeros([BT, BT], gl.float32, square)
    zero_o = gl.zeros([BV, BT], gl.float32, flat)
    for i_t in range(gl.cdiv(length, BT)):
        here, then = i_t % 2, (i_t + 1) % 2
        s_q, s_k, s_v = q_2.index(here), k_2.index(here), v_2.index(here)
        b_i, total = cumulative_decay(gl.convert_layout(b_g, col), o_i, o_j)
        await_copies(0)
        b_p = warpgroup_mma(s_q, s_k.permute((1, 0)), zero_p, use_acc=False, is_async=True)
        b_sh = gl.convert_layout(b_s.to(dtype), left)
        b_o = warpgroup_mma(b_sh, s_q.permute((1, 0)), zero_o, use_acc=False, is_async=True)
        token = (i_t + 1) * BT
        if token < length:
            fetch_rows(q_2.index(then), p_q + token.to(gl.int64) * stride_q, stride_q, length - token, W)
            fetch_rows(k_2.index(then), p_k + token.to(gl.int64) * stride_k, stride_k, length - token, W)
            fetch_rows(v_2.index(then), p_v + token.to(gl.int64) * stride_v, stride_v, length - token, W)
            async_copy.commit_group()
        b_g = load_decay(p_g + token.to(gl.int64) * HV, HV, length - token)

        # Oᵀ = e^b ⊙ (Sᵀ Qᵀ) + Vᵀ Pᵀ
        b_decay = causal_decay(b_i, gl.convert_layout(b_i, col), o_i, o_j)
        b_p = warpgroup_mma_wait(1, deps=[b_p])
        s_p.store((b_p * b_decay).to(dtype))
        fence_async_shared()
        barrier()
        from_j = gl.exp2(gl.convert_layout(b_i, gl.SliceLayout(0, flat)))
        b_o, b_sh = warpgroup_mma_wait(0, deps=[b_o, b_sh])
        b_o = warpgroup_mma(s_v.permute((1, 0)), s_p.permute((1, 0)), b_o * from_j[None, :], is_async=True)
        # Sᵀ ← e^b_C Sᵀ + (e^(b_C − b) ⊙ V)ᵀ K
        to_j = gl.exp2(total - gl.convert_layout(b_i, gl.SliceLayout(0, left_k)))
        b_v = (s_v.permute((1, 0)).load(left_k).to(gl.float32) * to_j[None, :]).to(dtype)
        b_s = warpgroup_mma(b_v, s_k, b_s * gl.exp2(total), is_async=True)
        b_o = warpgroup_mma_wait(1, deps=[b_o])
        s_o.permute((1, 0)).store((b_o * scale).to(dtype))
        barrier()
        store_rows(p_o + (i_t * BT).to(gl.int64) * HV * V, s_o, HV * V, length - i_t * BT, W)
        b_s, b_v = warpgroup_mma_wait(0, deps=[b_s, b_v])
    if not SEGMENTED:
        gl.store(final_state + o_state, b_s)


def hopper_forward(q, k, v, g, o, scale, initial_state, final_state, cu_seqlens, segment, spans, BV) -> None:
    """Write o and, unless it is None, the final states of `spans` sequences or segments of `segment` tokens."""
    B, T, G, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    hopper_forward_kernel[(spans * HV * (V // BV),)](
        q, k, v, g, o, initial_state, final_state, cu_seqlens,
        *(x.stride(1) // 8 for x in (q, k, v)), scale, T, N, G, HV, segment,
        K, V, BV, initial_state is not None, segment > 0, cu_seqlens is not None, num_warps=BV // 16,
    )  # fmt: skip
