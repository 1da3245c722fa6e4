"""Fused backward on Hopper: the producer, the reverse scan, and the barriers; `backward.py` has the diagram."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.ops.gated_delta_rule.hopper.backward_chunk import multiply
from tokenmix_core.ops.gated_delta_rule.hopper.gates import load_gate, range_factor

# pipeline stages of q, k, dO and the gates
NUM_STAGES = gl.constexpr(2)
# indices of barriers with one entry per stage: tiles loaded; tiles read; P' and q's inverse norms stored
FULL, EMPTY, SCORES = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)
# indices of barriers of one-stage buffers: buffer full; buffer empty. SUMMED: the gradient of the chunk's last b is
# stored
A_FULL, A_EMPTY = gl.constexpr(6), gl.constexpr(7)
R_FULL, R_EMPTY = gl.constexpr(8), gl.constexpr(9)
S_FULL, S_EMPTY = gl.constexpr(10), gl.constexpr(11)
DS_FULL, DS_EMPTY = gl.constexpr(12), gl.constexpr(13)
DY_FULL, DY_EMPTY = gl.constexpr(14), gl.constexpr(15)
P_EMPTY, SUMMED = gl.constexpr(16), gl.constexpr(17)
BARRIERS = gl.constexpr(18)


@gluon.jit
def initialise_barriers(barriers):
    """Initialise arrival counts: 128 for cp.async of 128 threads, 129 if gates are stored, too.

    For all other barriers, the count is the number of warpgroups that arrive.
    """
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(FULL + i), 129)
        mbarrier.init(barriers.index(EMPTY + i), 3)
        mbarrier.init(barriers.index(SCORES + i), 1)
    mbarrier.init(barriers.index(A_FULL), 128)
    mbarrier.init(barriers.index(A_EMPTY), 2)
    mbarrier.init(barriers.index(R_FULL), 128)
    mbarrier.init(barriers.index(R_EMPTY), 3)
    mbarrier.init(barriers.index(S_FULL), 128)
    mbarrier.init(barriers.index(S_EMPTY), 3)
    mbarrier.init(barriers.index(DS_FULL), 2)
    mbarrier.init(barriers.index(DS_EMPTY), 1)
    mbarrier.init(barriers.index(DY_FULL), 2)
    mbarrier.init(barriers.index(DY_EMPTY), 1)
    mbarrier.init(barriers.index(P_EMPTY), 1)
    mbarrier.init(barriers.index(SUMMED), 2)


# The scan goes backwards in time. rows: number of tokens from the start of the last chunk, where the scan begins, to
# the sequence's end; steps: number of chunks; warm: how many of them belong to later segments; known: number of columns
# of dS to load before the scan; wanted: number of columns to store after it
Span = namedtuple("Span", "rows steps warm known wanted")


@gluon.jit
def load_last(g_b, layout: gl.constexpr):
    """Return the chunk's last b from its cumulative log2 decays `g_b`, as a vector of one element.

    Row 63 is the last b of a partial chunk, too, because rows past the sequence's end repeat the last token's b.
    """
    return g_b.slice(63, 1).load(layout)


@gluon.jit
def divisible(b_w, b_r, dtype: gl.constexpr):
    """Return the divisor `b_w` = β r of gradients (r: the key's inverse norm); for bfloat16, at least 2^−48 r."""
    if dtype == gl.bfloat16:
        b_w = gl.where(gl.abs(b_w) < 2.0**-48 * b_r, 2.0**-48 * b_r, b_w)
    return b_w


@gluon.jit
def producer(pointers, tiles, stages, barriers, rows, steps, warm, H: gl.constexpr, HV: gl.constexpr):
    """Issue cp.async of each chunk's tiles as soon as their stage is empty; store the chunk's gates there too."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    p_q, p_k, p_do, p_a, p_r, p_s, p_gates = pointers
    q_s, k_s, do_s, gates_s = stages
    s_a, s_1, r_1 = tiles
    # strides are constexprs: as run-time values they would need more registers than this warpgroup is given
    D: gl.constexpr = k_s.shape[2]
    BT: gl.constexpr = k_s.shape[1]
    for i in range(steps):
        stage = i % NUM_STAGES
        b_b, b_w = load_gate(p_gates, rows, line), load_gate(p_gates + 1, rows, line)
        b_r = load_gate(p_gates + 2, rows, line)
        mbarrier.wait(barriers.index(EMPTY + stage), hopper.empty_parity(i, NUM_STAGES))
        hopper.async_copy_rows(k_s.index(stage), p_k, H * D, rows, 4)
        hopper.async_copy_rows(q_s.index(stage), p_q, H * D, rows, 4)
        hopper.async_copy_rows(do_s.index(stage), p_do, HV * D, rows, 4)
        async_copy.mbarrier_arrive(barriers.index(FULL + stage), increment_count=False)
        gates_s.index(stage * 4).store(b_b)
        gates_s.index(stage * 4 + 1).store(divisible(b_w, b_r, k_s.dtype))
        gates_s.index(stage * 4 + 2).store(b_r)
        mbarrier.arrive(barriers.index(FULL + stage))
        mbarrier.wait(barriers.index(A_EMPTY), hopper.empty_parity(i, 1))
        hopper.async_copy_rows(s_a, p_a, HV * BT, rows, 4)
        async_copy.mbarrier_arrive(barriers.index(A_FULL), increment_count=False)
        if i >= warm:
            mbarrier.wait(barriers.index(R_EMPTY), hopper.empty_parity(i - warm, 1))
            hopper.async_copy_rows(r_1.index(0), p_r, HV * D, rows, 4)
            async_copy.mbarrier_arrive(barriers.index(R_FULL), increment_count=False)
            mbarrier.wait(barriers.index(S_EMPTY), hopper.empty_parity(i - warm, 1))
            hopper.async_copy_rows(s_1.index(0), p_s, D, D, 4)
            async_copy.mbarrier_arrive(barriers.index(S_FULL), increment_count=False)
        p_q -= BT * H * D
        p_k -= BT * H * D
        p_do -= BT * HV * D
        p_r -= BT * HV * D
        p_a -= BT * HV * BT
        p_s -= HV * D * D
        p_gates -= BT * 4
        rows += BT


@gluon.jit
def compute_scores(s_q, s_k, s_p, g_b, g_w, g_n, scale):
    """Store the scores P' = tril(Q̂ Kᵀ ⊙ Γ) diag(β r) scale, and q's inverse norms, computed from Q Qᵀ's diagonal.

    Γ are the decays between the chunk's tokens, and r the keys' inverse norms.
    """
    BT: gl.constexpr = s_p.shape[0]
    row: gl.constexpr = gl.SliceLayout(1, hopper.mma_layout(BT, 4))
    col: gl.constexpr = gl.SliceLayout(0, hopper.mma_layout(BT, 4))
    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    b_n = warpgroup_mma_wait(0, deps=[multiply(s_q, s_q.permute((1, 0)), BT)])
    b_n = gl.rsqrt(gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_n, 0.0), 1) + 1e-6)
    g_n.store(b_n)
    b_p = warpgroup_mma_wait(0, deps=[multiply(s_q, s_k.permute((1, 0)), BT)])
    b_p *= (
        hopper.causal_decay(g_b.load(row) + hopper.log2(b_n), g_b.load(col), o_i, o_j)
        * (g_w.load(col) * scale)[None, :]
    )
    s_p.store(b_p.to(s_p.dtype))


@gluon.jit
def reverse_scan(pointers, tiles, stages, results, barriers, scale, span, HV: gl.constexpr, FIRST: gl.constexpr):
    """Scan 64 columns of dS over the chunks in reverse; dS is transposed, so that MMAs read it from registers.

    FIRST is the first of the columns. dS is loaded from `p_initial` if `span.known` is D, the head size, and starts at
    zero if it is 0. dS after the scan is stored at `p_final` if `span.wanted` is D. The first `span.warm` chunks belong
    to later segments: they are scanned without storing results.
    """
    rows, steps, warm, known, wanted = span
    p_initial, p_final, p_dv = pointers
    q_s, k_s, do_s, gates_s = stages
    s_a, s_1, r_1 = tiles
    ds_1, dy_1, s_p, s_ends = results
    dtype: gl.constexpr = k_s.dtype
    BT: gl.constexpr = k_s.shape[1]
    D: gl.constexpr = k_s.shape[2]
    # `b_ds` is RANGE · dS, so that float16 operands do not underflow
    RANGE: gl.constexpr = range_factor(dtype, D)
    tile: gl.constexpr = hopper.mma_layout(D, 4)
    flat: gl.constexpr = hopper.mma_layout(BT, 4)
    col: gl.constexpr = gl.SliceLayout(0, flat)
    left: gl.constexpr = gl.DotOperandLayout(0, flat, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    o_v, o_k = FIRST + gl.arange(0, 64, gl.SliceLayout(1, tile)), gl.arange(0, D, gl.SliceLayout(0, tile))
    p_tile = o_k[None, :] * D + o_v[:, None]
    b_ds = gl.load(p_initial + p_tile, mask=o_v[:, None] < known, other=0.0) * RANGE
    zero = gl.zeros([64, BT], gl.float32, flat)
    out_v = gl.zeros([64], gl.float32, gl.SliceLayout(1, tile))
    for i in range(steps):
        stage = i % NUM_STAGES
        s_q, s_k, s_dot = q_s.index(stage), k_s.index(stage), do_s.index(stage).slice(FIRST, 64, 1).permute((1, 0))
        g_b, g_w = gates_s.index(stage * 4), gates_s.index(stage * 4 + 1)
        g_r, g_n = gates_s.index(stage * 4 + 2), gates_s.index(stage * 4 + 3)
        at = hopper.opaque(0)
        s_s, s_dy = s_1.index(at), dy_1.index(at)
        s_dst, s_dyt = ds_1.index(at).slice(FIRST, 64, 1).permute((1, 0)), s_dy.slice(FIRST, 64, 1).permute((1, 0))
        mbarrier.wait(barriers.index(FULL + stage), hopper.parity(i, NUM_STAGES))
        fence_async_shared()
        if FIRST > 0:
            mbarrier.wait(barriers.index(P_EMPTY), hopper.empty_parity(i, 1))
            compute_scores(s_q, s_k, s_p, g_b, g_w, g_n, scale)
            fence_async_shared()
            mbarrier.arrive(barriers.index(SCORES + stage))
        # dS' is stored for the epilogue; then dR = scale P'ᵀ dO + 2^(b_last − b) β ⊙ (K dS')
        mbarrier.wait(barriers.index(DS_EMPTY), hopper.empty_parity(i, 1))
        s_dst.store((b_ds * (1 / RANGE)).to(dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.index(DS_FULL))
        b_dr = warpgroup_mma(s_dst, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_dr = warpgroup_mma_wait(0, deps=[b_dr])
        b_dr *= (g_w.load(col) * gl.exp2(load_last(g_b, col) - g_b.load(col)))[None, :]
        if i >= warm:
            mbarrier.wait(barriers.index(R_FULL), hopper.parity(i - warm, 1))
            b_r = hopper.widen(r_1.index(at).slice(FIRST, 64, 1).permute((1, 0)).load(flat))
            out_v = gl.convert_layout(gl.sum(b_r * b_dr, 1), gl.SliceLayout(1, tile))
            mbarrier.arrive(barriers.index(R_EMPTY))
        mbarrier.wait(barriers.index(SCORES + stage), hopper.parity(i, NUM_STAGES))
        b_dr = warpgroup_mma(s_dot, s_p, b_dr, is_async=True)
        b_dr = warpgroup_mma_wait(0, deps=[b_dr])
        if FIRST == 0:
            mbarrier.arrive(barriers.index(P_EMPTY))
        # dY = Ãᵀ dR, which is dV
        mbarrier.wait(barriers.index(A_FULL), hopper.parity(i, 1))
        fence_async_shared()
        b_dr = gl.convert_layout(b_dr.to(dtype), left)
        b_dy = warpgroup_mma(b_dr, s_a, zero, use_acc=False, is_async=True)
        b_dy, b_dr = warpgroup_mma_wait(0, deps=[b_dy, b_dr])
        mbarrier.arrive(barriers.index(A_EMPTY))
        if i >= warm:
            mbarrier.wait(barriers.index(DY_EMPTY), hopper.empty_parity(i - warm, 1))
            s_dyt.store(b_dy.to(dtype))
            fence_async_shared()
            mbarrier.arrive(barriers.index(DY_FULL))
            hopper.store_rows(p_dv + FIRST, s_dy.slice(FIRST, 64, 1), HV * D, rows, 4)
        b_dy = (b_dy * -(gl.exp2(g_b.load(col)) * g_r.load(col) * RANGE)[None, :]).to(dtype)
        if i >= warm:
            # the gradient of b_last is 2^b_last ⟨dS', S⟩ plus ⟨R, 2^(b_last − b) β ⊙ K dS'⟩ (`out_v`); dS' is not yet
            # rounded, because the terms of the first sum cancel
            mbarrier.wait(barriers.index(S_FULL), hopper.parity(i - warm, 1))
            b_s = hopper.widen(gl.convert_layout(s_s.slice(FIRST, 64, 1).permute((1, 0)).load(left_k), tile))
            b_end = gl.sum(b_s * b_ds, 1) * (1 / RANGE) * gl.exp2(load_last(g_b, gl.SliceLayout(1, tile))) + out_v
            # first add the two rows of each thread; the epilogue adds the 32 sums that are stored here
            s_ends.slice(FIRST // 2, 32).store(gl.sum(b_end.reshape([4, 2, 8]), 1).reshape([32]))
            mbarrier.arrive(barriers.index(SUMMED))
            mbarrier.arrive(barriers.index(S_EMPTY))
        # dS = 2^b_last dS' + scale Qᵀ (γ ⊙ dO) − Kᵀ (γ ⊙ dY), γ = 2^b
        b_g = gl.exp2(g_b.load(gl.SliceLayout(0, left_k))) * g_n.load(gl.SliceLayout(0, left_k)) * scale * RANGE
        b_do = hopper.scale_tile(s_dot.load(left_k), b_g[None, :])
        b_ds = warpgroup_mma(b_do, s_q, b_ds * gl.exp2(load_last(g_b, gl.SliceLayout(0, tile)))[None, :], is_async=True)
        b_dy = gl.convert_layout(b_dy, left_k)
        b_ds = warpgroup_mma(b_dy, s_k, b_ds, is_async=True)
        b_ds, b_dy, b_do = warpgroup_mma_wait(0, deps=[b_ds, b_dy, b_do])
        mbarrier.arrive(barriers.index(EMPTY + stage))
        p_dv -= BT * HV * D
        rows = rows + BT
    # opaque offsets: the compiler cannot compute them before the loop, where they would occupy registers
    p_tile = hopper.opaque(0) + o_k[None, :] * D + o_v[:, None]
    gl.store(p_final + p_tile, b_ds * (1 / RANGE), mask=o_v[:, None] < wanted)
