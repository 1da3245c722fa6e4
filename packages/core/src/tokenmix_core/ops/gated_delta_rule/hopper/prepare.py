"""`prepare` on Hopper: a chunk and key head a program of one warp, so that nothing waits for another warp.

The result of a product lies in registers as a left operand does, and as a right operand of the transposed product: what
becomes a right operand is computed transposed, and nothing moves between threads.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, SIZES, chunk_slots, sequences
from tokenmix_core.tile.hopper import fetch_rows, locate_chunk, row_layout
from tokenmix_core.tile.launch import cached_launch

# as in `tile.decay`
LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-160.0)

# blocks of 16 tokens: a product, and its operands
BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def parts(b_x, dtype: gl.constexpr):
    """A float32 tile as the sum of two 16-bit ones."""
    b_hi = b_x.to(dtype)
    return b_hi, (b_x - b_hi.to(gl.float32)).to(dtype)


@gluon.jit
def multiply(b_x, b_yt, b_z):
    """Z + X Y, from Yᵀ."""
    return mma_v2(gl.convert_layout(b_x, LEFT), gl.convert_layout(b_yt.permute((1, 0)), RIGHT), b_z)


@gluon.jit
def product(x, yt, b_z):
    """Z + X Y for X and Yᵀ in parts, without the product of their rests."""
    b_z = multiply(x[1], yt[0], b_z)
    b_z = multiply(x[0], yt[1], b_z)
    return multiply(x[0], yt[0], b_z)


@gluon.jit
def invert_diagonal(s_l):
    """(I + L)⁻¹ of four strictly lower blocks `[16, 16]` in place by rows; a thread holds two columns of a block."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16, 2], [4, 1, 8], [1, 1, 1], [2, 1, 0])
    o_b = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    o_j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    b_a = gl.where((o_b >= 0) & (o_i == o_j), 1.0, 0.0)
    for i in gl.static_range(1, 16):
        b_l = s_l.slice(i, 1, 1).permute((0, 2, 1)).load(layout)
        b_a = gl.where(o_i == i, b_a - gl.expand_dims(gl.sum(b_l * b_a, 1), 1), b_a)
    s_l.store(b_a)


@gluon.jit
def block_decays(s_gates, b_b, b_w, r_k, o_t):
    """Factors of L̃'s blocks: a decay from one block to another goes through the end of the earlier one, e.

    Stores b, w and r as vectors 0 to 2, the factors of columns −w 2^(e − b) as 3, and those of rows r 2^(b − e) as 4 to
    6, for the end of each block but the last.
    """
    s_gates.index(0).store(b_b)
    s_gates.index(1).store(b_w)
    s_gates.index(2).store(r_k)
    end = b_b
    for i in gl.static_range(3):
        e_i = gl.sum(gl.where(o_t == 16 * i + 15, b_b, 0.0), 0)
        end = gl.where(o_t // 16 == i, e_i, end)
        s_gates.index(4 + i).store(r_k * gl.exp2(gl.minimum(b_b - e_i, 0.0)))
    s_gates.index(3).store(b_w * -gl.exp2(end - b_b))


@gluon.jit
def invert(kk, s_gates, s_l, s_blocks, s_a, dtype: gl.constexpr):
    """Ã = (I + L̃)⁻¹ into `s_a`, from the blocks of K Kᵀ on and under the diagonal, row by row.

    Under the diagonal A_ij = A_ii X_ij with X_ij = −Σ_m L_im A_mj. Every factor is a piece of the matrix or of its
    inverse, so nothing grows beyond what these hold, as powers of L̃ would. Factors are taken in parts.
    """
    row: gl.constexpr = gl.SliceLayout(1, BLOCK)
    col: gl.constexpr = gl.SliceLayout(0, BLOCK)
    o_i, o_j = gl.arange(0, 16, row), gl.arange(0, 16, col)
    s_b, s_w, s_r, s_c = s_gates.index(0), s_gates.index(1), s_gates.index(2), s_gates.index(3)
    for i in gl.static_range(4):
        b_i, b_j = s_b.slice(16 * i, 16).load(row), s_b.slice(16 * i, 16).load(col)
        b_l = gl.exp2(gl.where(o_i[:, None] > o_j[None, :], b_i[:, None] - b_j[None, :], float("-inf")))
        b_l *= s_r.slice(16 * i, 16).load(row)[:, None] * s_w.slice(16 * i, 16).load(col)[None, :]
        s_l.index(i).store(kk[i * (i + 3) // 2] * b_l)
    invert_diagonal(s_blocks)

    zero = gl.zeros([16, 16], gl.float32, BLOCK)
    at = ()
    for i in gl.static_range(4):
        b_a = s_l.index(i).load(BLOCK)
        s_a.slice(16 * i, 16).slice(16 * i, 16, 1).store(b_a.to(dtype))
        a_ii, l_i = parts(b_a, dtype), ()
        for m in gl.static_range(i):
            b_row, b_col = s_gates.index(4 + m).slice(16 * i, 16).load(row), s_c.slice(16 * m, 16).load(col)
            l_i += (parts(kk[i * (i + 1) // 2 + m] * (b_row[:, None] * b_col[None, :]), dtype),)
        for j in gl.static_range(i):
            b_x = zero
            for m in gl.static_range(j, i):
                b_x = product(at[m * (m + 1) // 2 + j], l_i[m], b_x)
            xt = parts(b_x, dtype)
            s_a.slice(16 * i, 16).slice(16 * j, 16, 1).store(product(a_ii, xt, zero).to(dtype))
            if i < 3:
                at += (parts(product(xt, a_ii, zero), dtype),)
        if i < 3:
            at += (parts(s_l.index(i).permute((1, 0)).load(BLOCK), dtype),)


@cached_launch
@gluon.jit(do_not_specialize=SIZES)
def prepare_kernel(
    k, g, beta, cu_seqlens, inverse, gates, T, N, H, group, tokens,
    K: gl.constexpr, BT: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Ã, b, β r, r and β of one chunk, for the value heads of one key head."""
    dtype: gl.constexpr = k.dtype.element_ty
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    layout: gl.constexpr = row_layout(BT, 1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    i_slot, i_h = gl.program_id(0), gl.program_id(1)
    _, begin, length, start = locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED, 1)
    if start >= length:
        return
    first, rows = begin + start, length - start
    HV = H * group
    s_k = gl.allocate_shared_memory(dtype, [2 if K == 64 else K // 64, BT, 64], gl.NVMMASharedLayout(128, 16))
    s_gates = gl.allocate_shared_memory(gl.float32, [7, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(K // 64):
        fetch_rows(s_k.index(i), k + (first * H + i_h) * K + i * 64, H * K, rows, 1)
    async_copy.commit_group()
    async_copy.wait_group(0)

    # K Kᵀ in blocks on and under the diagonal, shared by the value heads
    zero = gl.zeros([16, 16], gl.float32, BLOCK)
    kk = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for i in gl.static_range(K // 64):
        s_x = s_k.index(i)
        k_0, k_1 = s_x.slice(0, 16).load(LEFT), s_x.slice(16, 16).load(LEFT)
        k_2, k_3 = s_x.slice(32, 16).load(LEFT), s_x.slice(48, 16).load(LEFT)
        kk = (
            multiply(k_0, k_0, kk[0]),
            multiply(k_1, k_0, kk[1]), multiply(k_1, k_1, kk[2]),
            multiply(k_2, k_0, kk[3]), multiply(k_2, k_1, kk[4]), multiply(k_2, k_2, kk[5]),
            multiply(k_3, k_0, kk[6]), multiply(k_3, k_1, kk[7]), multiply(k_3, k_2, kk[8]), multiply(k_3, k_3, kk[9]),
        )  # fmt: skip
    o_t = gl.arange(0, BT, line)
    r_k = gl.full([BT], 1.0, gl.float32, line)
    if L2NORM:
        o_i, o_j = gl.arange(0, 16, gl.SliceLayout(1, BLOCK)), gl.arange(0, 16, gl.SliceLayout(0, BLOCK))
        for i in gl.static_range(4):
            b_n = gl.sum(gl.where(o_i[:, None] == o_j[None, :], kk[i * (i + 3) // 2], 0.0), 1)
            s_gates.index(2).slice(16 * i, 16).store(b_n)
        r_k = gl.rsqrt(s_gates.index(2).load(line) + 1e-6)

    # the keys have been read: their place is for Ã and, twice in another form, for the blocks on the diagonal
    s_a = s_k.index(0)
    s_l = s_k.index(1)._reinterpret(gl.float32, [8, 16, 16], plain)
    s_blocks = s_k.index(1)._reinterpret(gl.float32, [8, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    s_a.store(gl.zeros([BT, BT], dtype, layout))
    o_i = gl.arange(0, BT, gl.SliceLayout(1, layout))[:, None]
    o_j = gl.arange(0, BT, gl.SliceLayout(0, layout))[None, :]
    for i_g in range(group):
        i_hv = i_h * group + i_g
        p_t, m_t = (first + o_t) * HV + i_hv, o_t < rows
        b_g = gl.maximum(gl.load(g + p_t, mask=m_t, other=0.0).to(gl.float32) * LOG2_E, LOWEST)
        b_beta = gl.load(beta + p_t, mask=m_t, other=0.0).to(gl.float32)
        b_b = gl.associative_scan(b_g, 0, add)
        p_gates = gates + (i_hv.to(gl.int64) * tokens + first + o_t) * 4
        gl.store(p_gates, b_b, mask=m_t)
        gl.store(p_gates + 1, b_beta * r_k, mask=m_t)
        gl.store(p_gates + 2, r_k, mask=m_t)
        gl.store(p_gates + 3, b_beta, mask=m_t)
        block_decays(s_gates, b_b, b_beta * r_k, r_k, o_t)
        invert(kk, s_gates, s_l, s_blocks.slice(0, 4), s_a, dtype)
        gl.store(inverse + ((first + o_i) * HV + i_hv) * BT + o_j, s_a.load(layout), mask=o_i < rows)


def prepare(
    k: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, qk_l2norm: bool, out: tuple[Tensor, Tensor]
) -> None:
    """Write Ã and the gates into `out`."""
    B, T, H, K = k.shape
    HV = g.shape[2]
    # 8 programs share a multiprocessor's registers; 12 that spill wait for each other's spills, beyond a small L1
    prepare_kernel[(chunk_slots(k, cu_seqlens), H)](
        k, g, beta, cu_seqlens, *out, T, sequences(k, cu_seqlens), H, HV // H, B * T,
        K, CHUNK, qk_l2norm, cu_seqlens is not None, num_warps=1, maxnreg=255,
    )  # fmt: skip
