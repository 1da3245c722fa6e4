"""Gates and Ã on Hopper: persistent programs of one warp, without barriers; a work item is a chunk of a key head.

    keys of the next chunk ─ cp.async, 1 stage ─┐ after K Kᵀ
    K Kᵀ (10 blocks of 16 × 16, MMA) ─► for each value head of the group: gates ─► L̃ ─► Ã by blocks ─► store

An accumulator of these MMAs has the register layout of a left operand, and its transpose the layout of a right operand.
Right operands are therefore computed transposed, and no element moves between threads.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from tokenmix_core.chunking import chunk_slots, num_sequences
from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.gluon.hopper import LOG2_E, LOWEST
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK

# warps (programs) per SM; with more warps, registers would spill
WARPS = 8

# register layouts of blocks of 16 × 16: an MMA's accumulator, its left operand, its right operand
BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))


@gluon.jit
def multiply(b_x, b_yt, b_z):
    """Return Z + X Y, with Y given as Yᵀ."""
    return mma_v2(gl.convert_layout(b_x, LEFT), gl.convert_layout(b_yt.permute((1, 0)), RIGHT), b_z)


@gluon.jit
def split_multiply(x, yt, b_z):
    """Return Z + X Y; X and Yᵀ are pairs (high part, low part); the negligible MMA of the two low parts is omitted."""
    b_z = multiply(x[1], yt[0], b_z)
    b_z = multiply(x[0], yt[1], b_z)
    return multiply(x[0], yt[0], b_z)


@gluon.jit
def invert_diagonal(s_l):
    """Replace four strictly lower triangular blocks L `[16, 16]` by (I + L)⁻¹, row by row; a thread has two columns."""
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
    """Store row and column factors of L̃'s 16 × 16 blocks; the decay from block j to i is split at e, the last b of j.

    Vectors 0 to 2 are b (cumulative decays), w = β r and r; vector 3 has the column factors −w 2^(e − b); vectors 4 to
    6 have the row factors r 2^(b − e), one vector for e of each of the first three blocks.
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
def invert(kk, s_gates, s_l, s_blocks, s_a, p_a, stride: gl.constexpr, rows, dtype: gl.constexpr):
    """Compute Ã = (I + L̃)⁻¹, one row of 16 × 16 blocks after the other, from blocks of K Kᵀ not above the diagonal.

    Below the diagonal the blocks A of Ã are A_ij = A_ii X_ij with X_ij = −Σ_m L_im A_mj, L being the blocks of L̃ and
    j ≤ m < i. Every factor is a block of L̃ or of Ã, so that no intermediate exceeds their entries, as powers of L̃
    would. Factors are split into high and low parts.
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

    zero, nothing = gl.zeros([16, 16], gl.float32, BLOCK), gl.zeros([16, 16], dtype, BLOCK)
    at = ()
    for i in gl.static_range(4):
        b_a = s_l.index(i).load(BLOCK)
        s_row = s_a.index(i % 2)
        s_row.slice(16 * i, 16, 1).store(b_a.to(dtype))
        for j in gl.static_range(i + 1, 4):
            s_row.slice(16 * j, 16, 1).store(nothing)
        a_ii, l_i = hopper.split_hi_lo(b_a, dtype), ()
        for m in gl.static_range(i):
            b_row, b_col = s_gates.index(4 + m).slice(16 * i, 16).load(row), s_c.slice(16 * m, 16).load(col)
            l_i += (hopper.split_hi_lo(kk[i * (i + 1) // 2 + m] * (b_row[:, None] * b_col[None, :]), dtype),)
        for j in gl.static_range(i):
            b_x = zero
            for m in gl.static_range(j, i):
                b_x = split_multiply(at[m * (m + 1) // 2 + j], l_i[m], b_x)
            xt = hopper.split_hi_lo(b_x, dtype)
            s_row.slice(16 * j, 16, 1).store(split_multiply(a_ii, xt, zero).to(dtype))
            if i < 3:
                at += (hopper.split_hi_lo(split_multiply(xt, a_ii, zero), dtype),)
        if i < 3:
            at += (hopper.split_hi_lo(s_l.index(i).permute((1, 0)).load(BLOCK), dtype),)
        hopper.store_rows(p_a + 16 * i * stride, s_row, stride, rows - 16 * i, 1)


@gluon.jit
def load_gates(g, beta, token, i_hv, HV: gl.constexpr, rows, BT: gl.constexpr):
    """Return g and β of value head `i_hv` for the chunk at `token`; 0 past the sequence's end."""
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_t = gl.arange(0, BT, line)
    p_t = (token + o_t) * HV + i_hv
    return gl.load(g + p_t, mask=o_t < rows, other=0.0), gl.load(beta + p_t, mask=o_t < rows, other=0.0)


@gluon.jit
def store_gates(p_gates, b_b, b_w, r_k, b_beta, rows):
    """Store cumulative decays b, β r, inverse key norms r, and β, the four gates of a token side by side."""
    b_gates = gl.join(gl.join(b_b, r_k), gl.join(b_w, b_beta))
    layout: gl.constexpr = gl.BlockedLayout([2, 4], [32, 1], [1, 1], [1, 0])
    b_gates = gl.convert_layout(gl.reshape(b_gates, [64, 4]), layout)
    o_t = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    o_g = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    gl.store(p_gates + o_t * 4 + o_g, b_gates, mask=o_t < rows)


@gluon.jit
def find(i_u, units, T, N, H: gl.constexpr, cu_seqlens, BT: gl.constexpr, PACKED: gl.constexpr):
    """Return work item `i_u`'s key head, first token, and tokens up to the sequence's end (0 if `i_u` ≥ `units`)."""
    i_slot = gl.minimum(i_u, units - 1) // H
    _, begin, length, start = hopper.locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED, 1)
    return i_u % H, begin + start, gl.where(i_u < units, length - start, 0)


@gluon.jit
def prefetch_keys(s_k, k, token, i_h, H: gl.constexpr, rows, K: gl.constexpr):
    """Issue cp.async of a chunk's keys, in tiles of 64 columns."""
    for i in gl.static_range(K // 64):
        hopper.async_copy_rows(s_k.index(i), k + (token * H + i_h) * K + i * 64, H * K, rows, 1)
    async_copy.commit_group()


@cached_launch
@gluon.jit(do_not_specialize=("T", "N", "tokens", "units"))
def prepare_kernel(
    k, g, beta, cu_seqlens, inverse, gates, T, N, tokens, units,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr, L2NORM: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute Ã, cumulative decays b, inverse key norms r, β r and β; a program takes several chunks and key heads."""
    dtype: gl.constexpr = k.dtype.element_ty
    line: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    group: gl.constexpr = HV // H
    gdc_launch_dependents()
    s_k = gl.allocate_shared_memory(dtype, [K // 64, BT, 64], gl.NVMMASharedLayout(128, 16))
    s_gates = gl.allocate_shared_memory(gl.float32, [7, BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s_l = gl.allocate_shared_memory(gl.float32, [4, 16, 16], plain)
    s_blocks = hopper.reinterpret(s_l, gl.float32, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    # two buffers: one row of blocks is stored while the next row is computed
    s_a = gl.allocate_shared_memory(dtype, [2, 16, BT], gl.NVMMASharedLayout(128, 16))
    o_t = gl.arange(0, BT, line)
    zero = gl.zeros([16, 16], gl.float32, BLOCK)

    i_h, token, rows = find(gl.program_id(0), units, T, N, H, cu_seqlens, BT, PACKED)
    prefetch_keys(s_k, k, token, i_h, H, rows, K)
    for i_u in range(gl.program_id(0), units, gl.num_programs(0)):
        b_g, b_beta = load_gates(g, beta, token, i_h * group, HV, rows, BT)
        async_copy.wait_group(0)
        # the blocks of K Kᵀ on and below the diagonal, computed once for all value heads of the key head
        kk = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
        # do not unroll this loop: unrolled code would need more registers than a thread has
        for i_k in range(K // 64):
            s_x = s_k.index(i_k)
            k_0, k_1 = s_x.slice(0, 16).load(LEFT), s_x.slice(16, 16).load(LEFT)
            k_2, k_3 = s_x.slice(32, 16).load(LEFT), s_x.slice(48, 16).load(LEFT)
            kk = (
                multiply(k_0, k_0, kk[0]),
                multiply(k_1, k_0, kk[1]), multiply(k_1, k_1, kk[2]),
                multiply(k_2, k_0, kk[3]), multiply(k_2, k_1, kk[4]), multiply(k_2, k_2, kk[5]),
                multiply(k_3, k_0, kk[6]), multiply(k_3, k_1, kk[7]), multiply(k_3, k_2, kk[8]),
                multiply(k_3, k_3, kk[9]),
            )  # fmt: skip
        this_h, first, left = i_h, token, rows
        i_h, token, rows = find(i_u + gl.num_programs(0), units, T, N, H, cu_seqlens, BT, PACKED)
        prefetch_keys(s_k, k, token, i_h, H, rows, K)
        r_k = gl.full([BT], 1.0, gl.float32, line)
        if L2NORM:
            o_i, o_j = gl.arange(0, 16, gl.SliceLayout(1, BLOCK)), gl.arange(0, 16, gl.SliceLayout(0, BLOCK))
            for i in gl.static_range(4):
                b_n = gl.sum(gl.where(o_i[:, None] == o_j[None, :], kk[i * (i + 3) // 2], 0.0), 1)
                s_gates.index(2).slice(16 * i, 16).store(b_n)
            r_k = gl.rsqrt(s_gates.index(2).load(line) + 1e-6)
        for i_g in range(group):
            i_hv = this_h * group + i_g
            if group > 1 and i_g > 0:
                b_g, b_beta = load_gates(g, beta, first, i_hv, HV, left, BT)
            b_w = b_beta.to(gl.float32) * r_k
            b_b = gl.associative_scan(gl.maximum(b_g.to(gl.float32) * LOG2_E, LOWEST), 0, hopper.add)
            store_gates(gates + (i_hv.to(gl.int64) * tokens + first) * 4, b_b, b_w, r_k, b_beta.to(gl.float32), left)
            block_decays(s_gates, b_b, b_w, r_k, o_t)
            p_a = inverse + (first * HV + i_hv) * BT
            invert(kk, s_gates, s_l, s_blocks, s_a, p_a, HV * BT, left, dtype)


def prepare(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    inverse: Tensor,
    gates: Tensor,
) -> None:
    """Write Ã and the gates into `inverse` and `gates`."""
    B, T, H, K = k.shape
    HV = g.shape[2]
    units = chunk_slots(B, T, CHUNK, cu_seqlens) * H
    # for K = 256 shared memory suffices for only five one-warp programs per SM
    warps = WARPS if K < 256 else 5
    prepare_kernel[(min(units, warps * tuning.sm_count(k.device)),)](
        k=k, g=g, beta=beta, cu_seqlens=cu_seqlens, inverse=inverse, gates=gates, T=T, N=num_sequences(k, cu_seqlens),
        tokens=B * T, units=units, H=H, HV=HV, K=K, BT=CHUNK, L2NORM=qk_l2norm, PACKED=cu_seqlens is not None,
        num_warps=1, maxnreg=255,
    )  # fmt: skip
