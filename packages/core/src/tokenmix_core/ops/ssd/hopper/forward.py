"""SSD forward on Hopper: one program per sequence or segment, head and BV columns of the state.

    q k v ─ cp.async, 2 stages ─ wait ─► P = Q Kᵀ ─┐ one chunk ahead of the loop
    chunk t:  Oᵀ = Sᵀ Qᵀ ─► scale P ─► prefetch t + 1 ─► Oᵀ += Vᵀ Pᵀ ─► Sᵀ ← e^b Sᵀ + Vᵀ K ─► store O ─► Q Kᵀ of t + 1

S is the state, b the cumulative decay; the update of S takes the chunk's last b, b_C, and V times Δ e^(b_C − b). The
prefetch overwrites the stage of chunk t − 1; it starts after a barrier, when all warps have read that stage.
"""

# ruff would ask for starred expressions in tuples, which Triton does not support
# ruff: noqa: RUF005

from collections import namedtuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.slots import Pool, slot_arguments
from tokenmix_core.ops.ssd.hopper.smem_vectors import allocate_vectors, as_matrix, load_vectors, store_decays
from tokenmix_core.ops.ssd.types import Inputs


@gluon.jit
def locate_span(i_s, T, N, segment, cu_seqlens, SEGMENTED: gl.constexpr, PACKED: gl.constexpr):
    """Return first row, length (≤ 0 if there is no token) and first chunk's index of sequence or segment `i_s`."""
    if SEGMENTED:
        i_n, begin, length, start = hopper.locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED, gl.num_warps())
        length = gl.minimum(length - start, segment)
    else:
        i_n, start = i_s, 0
        begin, length = hopper.sequence_span(i_s, T, cu_seqlens, PACKED)
    i_c = hopper.first_chunk(i_n, begin, T, 64, PACKED) + start // 64
    return begin + start, length, i_c


@gluon.jit
def prefetch_parts(x_2, i, p_rows, stride, rows, WARPS: gl.constexpr, OPAQUE: gl.constexpr = False):
    """Issue cp.async of a chunk's rows to stage i, in parts of as many columns as a buffer of `x_2` has."""
    PARTS: gl.constexpr = x_2.shape[0] // 2
    for p in gl.static_range(PARTS):
        hopper.async_copy_rows(x_2.index(i * PARTS + p), p_rows + p * x_2.shape[2], stride, rows, WARPS, OPAQUE)


@gluon.jit
def update_state(b_s, b_v, k_2, i, decay):
    """Issue the MMAs Sᵀ ← decay Sᵀ + Vᵀ K, one for each part of K's columns; return the pending accumulators."""
    PARTS: gl.constexpr = k_2.shape[0] // 2
    b_new = ()
    for p in gl.static_range(PARTS):
        b_new = b_new + (warpgroup_mma(b_v, k_2.index(i * PARTS + p), b_s[p] * decay, is_async=True),)
    return b_new


@gluon.jit
def store_state(p_s, b_s, stride: gl.constexpr):
    """Store the parts of the state `b_s` at `p_s`, `stride` elements apart."""
    for p in gl.static_range(len(b_s)):
        gl.store(p_s + p * stride, b_s[p].to(p_s.dtype.element_ty))


@gluon.jit
def wait_state(b_s, b_v):
    """Wait for the MMAs of all parts of the state; listing V keeps its registers live until the MMAs have read them."""
    done = warpgroup_mma_wait(0, deps=(b_v,) + b_s)
    return done[1:]


@gluon.jit
def multiply_keys(q_2, k_2, i, zero):
    """Issue the MMA Q Kᵀ of the chunk in stage i; return the pending accumulator."""
    PARTS: gl.constexpr = k_2.shape[0] // 2
    b_p = zero
    for p in gl.static_range(PARTS):
        s_q, s_k = q_2.index(i * PARTS + p), k_2.index(i * PARTS + p)
        b_p = warpgroup_mma(s_q, s_k.permute((1, 0)), b_p, use_acc=p > 0, is_async=True)
    return b_p


# pointers to a head's rows, and the strides between tokens; dt may be None
Rows = namedtuple("Rows", "k v g dt stride_k stride_v")
# shared memory of two stages: rows of k and v, and the vectors b, scale e^b and e^(b_C − b)
Stages = namedtuple("Stages", "k v b from_start to_end")


@gluon.jit
def scan_chunks(b_s, p, stages, HV, chunks):
    """Scan `chunks` whole chunks without outputs; return the parts of the transposed state after them."""
    k, v, g, dt, stride_k, stride_v = p.k, p.v, p.g, p.dt, p.stride_k, p.stride_v
    k_2, v_2, b_2, from_2, to_2 = stages.k, stages.v, stages.b, stages.from_start, stages.to_end
    BT: gl.constexpr = k_2.shape[1]
    W: gl.constexpr = gl.num_warps()
    tile: gl.constexpr = hopper.mma_layout(k_2.shape[2], W)
    left: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    rows = gl.where(chunks > 0, BT, 0)
    prefetch_parts(k_2, 0, k, stride_k, rows, W)
    hopper.async_copy_rows(v_2.index(0), v, stride_v, rows, W)
    async_copy.commit_group()
    b_g = load_vectors(g, HV, rows, 1)
    for i in range(chunks):
        stage, next_stage = i % 2, (i + 1) % 2
        total, b_to = store_decays(b_2.index(stage), from_2.index(stage), to_2.index(stage), b_g, 1.0)
        if dt is not None:
            b_dt = load_vectors(dt + (i * BT).to(gl.int64) * HV, HV, BT, 1)
            as_matrix(to_2.index(stage), 1, BT).store(b_dt * b_to)
        hopper.wait_async_copies(0)
        o_t, rows = ((i + 1) * BT).to(gl.int64), gl.where(i + 1 < chunks, BT, 0)
        prefetch_parts(k_2, next_stage, k + o_t * stride_k, stride_k, rows, W, True)
        hopper.async_copy_rows(v_2.index(next_stage), v + o_t * stride_v, stride_v, rows, W, True)
        async_copy.commit_group()
        b_g = load_vectors(g + o_t * HV, HV, rows, 1)
        to_j = to_2.index(stage).load(gl.SliceLayout(0, left))
        b_v = (v_2.index(stage).permute((1, 0)).load(left).to(gl.float32) * to_j[None, :]).to(v_2.dtype)
        b_s = update_state(b_s, b_v, k_2, stage, gl.exp2(gl.sum(total, 0)))
        b_s = wait_state(b_s, b_v)
    hopper.wait_async_copies(0)
    return b_s


@cached_launch
@gluon.jit(do_not_specialize=["T", "N", "G", "HV", "segment"])
def hopper_forward_kernel(
    q, k, v, g, dt, skip, o, initial_state, final_state, cu_seqlens, slots, fresh,
    stride_q, stride_k, stride_v, stride_state, scale, T, N, G, HV, segment,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, INITIAL: gl.constexpr,
    SEGMENTED: gl.constexpr, LOOKBACK: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute outputs and states of a sequence or (SEGMENTED) segment.

    With `LOOKBACK` a segment's program first scans the chunks before the segment. With `slots`, final states are stored
    in slots of the pool `final_state`, as in the portable kernel.

    The state is transposed, `[BV, K]`, 16 rows per warp: matrices computed from it are register operands. For K = 256
    the state has two parts, which become operands one after the other, because registers do not hold both as operands.

    Names that end in `_i` are vectors over a tile's rows, in `_j` over its columns, in `_2` buffers of two pipeline
    stages. The strides of q, k and v are in units of 16 bytes, `stride_state` is in elements.
    """
    BT: gl.constexpr = 64
    W: gl.constexpr = BV // 16
    dtype: gl.constexpr = q.dtype.element_ty
    # if K is 256, q, k and the state are split into two parts of 128 columns of K
    KP: gl.constexpr = min(K, 128)
    PARTS: gl.constexpr = K // KP
    tile: gl.constexpr = hopper.mma_layout(KP, W)
    flat: gl.constexpr = hopper.mma_layout(BT, W)
    # each warpgroup computes part of the columns of the scores P
    square: gl.constexpr = hopper.mma_layout_split_n(BT, W)
    row: gl.constexpr = gl.SliceLayout(1, square)
    col: gl.constexpr = gl.SliceLayout(0, square)
    left: gl.constexpr = gl.DotOperandLayout(0, flat, 2)
    left_k: gl.constexpr = gl.DotOperandLayout(0, tile, 2)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    i_v = gl.program_id(0) % (V // BV)
    i_h = gl.program_id(0) // (V // BV) % HV
    i_s = gl.program_id(0) // (V // BV) // HV
    begin, length, _ = locate_span(i_s, T, N, segment, cu_seqlens, SEGMENTED, PACKED)
    if SEGMENTED and length <= 0:
        return
    # strides come in units of 8 elements, which tells the compiler that rows are 16-byte aligned
    stride_q, stride_k, stride_v = stride_q * 8, stride_k * 8, stride_v * 8
    i_n, past = i_s, 0
    if LOOKBACK:
        i_n = i_s // gl.cdiv(T, segment)
        past = i_s % gl.cdiv(T, segment) * segment
    i_g = i_h // (HV // G)
    p_q, p_k = q + begin * stride_q + i_g * K, k + begin * stride_k + i_g * K
    p_v, p_o = (v + begin * stride_v + i_h * V + i_v * BV, o + (begin * HV + i_h) * V + i_v * BV)
    o_h = begin * HV + i_h

    q_2 = gl.allocate_shared_memory(dtype, [2 * PARTS, BT, KP], shared)
    k_2 = gl.allocate_shared_memory(dtype, [2 * PARTS, BT, KP], shared)
    v_2 = gl.allocate_shared_memory(dtype, [2, BT, BV], shared)
    s_p = gl.allocate_shared_memory(dtype, [BT, BT], shared)
    s_o = gl.allocate_shared_memory(dtype, [BT, BV], shared)
    # vectors of a chunk: cumulative decays b; scale e^b; and e^(b_C − b), where b_C is the chunk's last b
    b_2, from_2, to_2 = (allocate_vectors(2, BT), allocate_vectors(2, BT), allocate_vectors(2, BT))
    o_v, o_k = (gl.arange(0, BV, gl.SliceLayout(1, tile)), gl.arange(0, KP, gl.SliceLayout(0, tile)))
    o_state = (i_n.to(gl.int64) * HV + i_h) * K * V + i_v * BV
    o_state = o_state + o_k[None, :] * V + o_v[:, None]
    if slots is not None:
        i_last, ends = i_s, True
        if SEGMENTED:
            i_last, _, whole, start = hopper.locate_chunk(i_s, T, segment, N, cu_seqlens, PACKED, W)
            ends = start + segment >= whole
        slot, held = hopper.locate_slot(i_last, slots, fresh)
        o_final = slot * stride_state + i_h * (K * V) + i_v * BV + o_k[None, :] * V + o_v[:, None]
    b_s = ()
    for p in gl.static_range(PARTS):
        if slots is not None and not SEGMENTED:
            m_held = o_v[:, None] < gl.where(held, BV, 0)
            b_held = gl.load(initial_state + (o_final + p * KP * V), mask=m_held, other=0.0)
            b_s = b_s + (b_held.to(gl.float32),)
        else:
            p_s = initial_state + (o_state + p * KP * V) if INITIAL else None
            b_s = b_s + (gl.load(p_s) if INITIAL else gl.zeros([BV, KP], gl.float32, tile),)
    if LOOKBACK:
        back = -past.to(gl.int64)
        p_dt = dt if dt is None else dt + o_h + back * HV
        earlier = Rows(
            p_k + back * stride_k, p_v + back * stride_v, g + o_h + back * HV, p_dt, stride_k, stride_v
        )  # fmt: skip
        b_s = scan_chunks(b_s, earlier, Stages(k_2, v_2, b_2, from_2, to_2), HV, past // BT)
    prefetch_parts(q_2, 0, p_q, stride_q, length, W)
    prefetch_parts(k_2, 0, p_k, stride_k, length, W)
    hopper.async_copy_rows(v_2.index(0), p_v, stride_v, length, W)
    async_copy.commit_group()
    b_g = load_vectors(g + o_h, HV, length, 1)
    total, b_to = store_decays(b_2.index(0), from_2.index(0), to_2.index(0), b_g, scale)
    # enter_2: Δ e^(b_C − b), a token's weight in the state at the chunk's end
    enter_2 = to_2
    if dt is not None:
        dt_2, enter_2 = allocate_vectors(2, BT), allocate_vectors(2, BT)
        b_dt = load_vectors(dt + o_h, HV, length, 1)
        as_matrix(dt_2.index(0), 1, BT).store(b_dt)
        as_matrix(enter_2.index(0), 1, BT).store(b_dt * b_to)
    if skip is not None:
        b_skip = gl.load(skip + i_h).to(gl.float32)

    o_i, o_j = gl.arange(0, BT, row), gl.arange(0, BT, col)
    zero_p = gl.zeros([BT, BT], gl.float32, square)
    zero_o = gl.zeros([BV, BT], gl.float32, flat)
    hopper.wait_async_copies(0)
    b_p = multiply_keys(q_2, k_2, 0, zero_p)
    b_p = warpgroup_mma_wait(0, deps=[b_p])
    for i_t in range(gl.cdiv(length, BT)):
        stage, next_stage = i_t % 2, (i_t + 1) % 2
        s_v = v_2.index(stage)
        b_sh = gl.convert_layout(b_s[0].to(dtype), left)
        b_o = warpgroup_mma(b_sh, q_2.index(stage * PARTS).permute((1, 0)), zero_o, use_acc=False, is_async=True)
        token = (i_t + 1) * BT
        o_t = token.to(gl.int64)
        b_g = load_vectors(g + o_h + o_t * HV, HV, length - token, 1)
        if dt is not None:
            b_dt = load_vectors(dt + o_h + o_t * HV, HV, length - token, 1)

        # Oᵀ = scale e^b ⊙ (Sᵀ Qᵀ) + Vᵀ Pᵀ
        b_decay = hopper.causal_decay(b_2.index(stage).load(row), b_2.index(stage).load(col), o_i, o_j) * scale
        if dt is not None:
            b_decay *= dt_2.index(stage).load(col)[None, :]
        b_p *= b_decay
        if skip is not None:
            b_p = gl.where(o_i[:, None] == o_j[None, :], b_p + b_skip, b_p)
        s_p.store(b_p.to(dtype))
        fence_async_shared()
        hopper.barrier()
        # the prefetch may overwrite this stage: all warps have completed the previous chunk's MMAs, which read it
        if token < length:
            prefetch_parts(q_2, next_stage, p_q + o_t * stride_q, stride_q, length - token, W, True)
            prefetch_parts(k_2, next_stage, p_k + o_t * stride_k, stride_k, length - token, W, True)
            hopper.async_copy_rows(v_2.index(next_stage), p_v + o_t * stride_v, stride_v, length - token, W, True)
            async_copy.commit_group()
        from_j = from_2.index(stage).load(gl.SliceLayout(0, flat))
        b_o, b_sh = warpgroup_mma_wait(0, deps=[b_o, b_sh])
        for p in gl.static_range(1, PARTS):
            b_sh = gl.convert_layout(b_s[p].to(dtype), left)
            b_o = warpgroup_mma(b_sh, q_2.index(stage * PARTS + p).permute((1, 0)), b_o, is_async=True)
            b_o, b_sh = warpgroup_mma_wait(0, deps=[b_o, b_sh])
        b_o = warpgroup_mma(s_v.permute((1, 0)), s_p.permute((1, 0)), b_o * from_j[None, :], is_async=True)
        # Sᵀ ← e^b_C Sᵀ + (e^(b_C − b) Δ ⊙ V)ᵀ K
        to_j = enter_2.index(stage).load(gl.SliceLayout(0, left_k))
        b_v = (s_v.permute((1, 0)).load(left_k).to(gl.float32) * to_j[None, :]).to(dtype)
        b_s = update_state(b_s, b_v, k_2, stage, gl.exp2(gl.sum(total, 0)))
        b_o = warpgroup_mma_wait(PARTS, deps=[b_o])
        s_o.permute((1, 0)).store(b_o.to(dtype))
        hopper.barrier()
        hopper.store_rows(p_o + (i_t * BT).to(gl.int64) * HV * V, s_o, HV * V, length - i_t * BT, W, True)
        total, b_to = store_decays(b_2.index(next_stage), from_2.index(next_stage), to_2.index(next_stage), b_g, scale)
        if dt is not None:
            as_matrix(dt_2.index(next_stage), 1, BT).store(b_dt)
            as_matrix(enter_2.index(next_stage), 1, BT).store(b_dt * b_to)
        # compute Q Kᵀ of the next chunk during the state's MMAs; after the last chunk its result is unused
        hopper.wait_async_copies(0)
        b_p = multiply_keys(q_2, k_2, next_stage, zero_p)
        done = warpgroup_mma_wait(0, deps=(b_p, b_v) + b_s)
        b_p, b_s = done[0], done[2:]
    if slots is not None:
        if ends & (slot >= 0):
            store_state(final_state + o_final, b_s, KP * V)
    elif LOOKBACK:
        if past + segment >= T:
            store_state(final_state + o_state, b_s, KP * V)
    elif not SEGMENTED:
        store_state(final_state + o_state, b_s, KP * V)


def hopper_forward(
    x: Inputs,
    *,
    entering: Tensor | None,
    o: Tensor,
    final_state: Tensor | None,
    segment: int,
    spans: int,
    columns: int,
    pool: Pool | None = None,
) -> None:
    """Write o of `spans` sequences, or segments of `segment` tokens, and unless None the sequences' final states.

    If there are segments and final states but no `pool`, each program scans its sequence from the start (`LOOKBACK`). A
    program computes `columns` columns of V. With `pool`, final states overwrite its slots.
    """
    _, T, G, K = x.q.shape
    HV, V = x.v.shape[2:]
    stride_q, stride_k, stride_v = (y.stride(1) // 8 for y in (x.q, x.k, x.v))
    hopper_forward_kernel[(spans * HV * (V // columns),)](
        q=x.q, k=x.k, v=x.v, g=x.g, dt=x.dt, skip=x.D, o=o, initial_state=entering, final_state=final_state,
        **slot_arguments(pool), cu_seqlens=x.cu_seqlens, stride_q=stride_q, stride_k=stride_k, stride_v=stride_v,
        scale=x.scale, T=T, N=num_sequences(x.q, x.cu_seqlens), G=G, HV=HV, segment=segment, K=K, V=V, BV=columns,
        INITIAL=entering is not None, SEGMENTED=segment > 0,
        LOOKBACK=segment > 0 and final_state is not None and pool is None, PACKED=x.cu_seqlens is not None,
        num_warps=columns // 16,
    )  # fmt: skip
