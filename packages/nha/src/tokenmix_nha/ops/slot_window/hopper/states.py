"""Hopper kernel that scans the slots over the chunks; it stores each chunk's slots, log2 decay and if it is strong.

One CTA of two warpgroups scans one head over one sequence, or over one segment of the sequence. The CTA holds all
channels of the head, so gates are computed only once. Iteration i, with NUM_STAGES pipeline stages of keys and values
and two of gates:

    cp.async   k, v of chunk i + NUM_STAGES − 1, f of chunk i + NUM_STAGES
    WGMMA      S ← decay_i S + k_iᵀ w_i            (S in registers, rounded to smem and stored before the update)
    WGMMA      sums of log-gates of chunk i + 1 ──► decay_{i+1}, weights w_{i+1} in smem
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.kernels import cached_launch
from tokenmix_core.kernels.gluon import LOG2_E, async_load, barrier, row_layout, wait_async_copies
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.hopper.gates import (
    Ring,
    begin_of_keys,
    earlier_tokens,
    enter_weight,
    first_entry,
    row_pointers,
)
from tokenmix_nha.ops.slot_window.states import launch_scan, pool_of_scan
from tokenmix_nha.ops.slot_window.tile import Chunks
from tokenmix_nha.ops.slot_window.types import Inputs, Layout, Pool, Results, Saved

_LARGEST_FACTOR = gl.constexpr(80.0)
_WARPS = gl.constexpr(8)
# buffers in smem (with pipeline stages) for keys, values and gates, or pointers to these of one head of a sequence, or
# their ring buffers
_Tokens = namedtuple("_Tokens", "k v f")


@gluon.constexpr_function
def _warpgroup_layout(rows, columns):
    """Return the WGMMA accumulator layout of two warpgroups: each has 64 of 128 rows, or half of the columns."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 128 // rows], [16, columns * rows // 128, 16])


@gluon.jit
def _sums(s_mask, s_high, s_low, layout: gl.constexpr):
    """Start the WGMMAs that multiply `s_mask`, a matrix of 0 and 1, by log-gates, which have two bf16 parts."""
    R: gl.constexpr = s_mask.shape[0]
    M: gl.constexpr = s_high.shape[1]
    zero = gl.zeros([R, M], gl.float32, layout)
    b_sum = warpgroup_mma(s_mask, s_high, zero, use_acc=False, is_async=True)
    return warpgroup_mma(s_mask, s_low, b_sum, is_async=True)


@gluon.jit
def _store_hi_lo(b_f, s_high, s_low):
    """Store log2 gates, after clamping, as two bf16 parts of 8 bits each."""
    b_log = gl.maximum(b_f * LOG2_E, -14.0)
    b_high = b_log.to(s_high.dtype)
    s_high.store(b_high)
    s_low.store((b_log - b_high.to(gl.float32)).to(s_low.dtype))


@gluon.jit
def _within(o_t, oldest, rows, ring):
    """Return the mask of tokens before `rows`, and from `oldest` on if there is a ring buffer."""
    m_t = o_t < rows
    if ring.tensor is not None:
        m_t = m_t & (o_t >= oldest)
    return m_t


@gluon.jit
def _async_copy_rows(s_x, p_x, first, oldest, rows, stride, ring):
    """Start an async copy of rows of a sequence's keys or values to smem, from row `first` on; rows outside [oldest,
    rows) become 0. `ring`: a `gates.Ring`."""
    layout: gl.constexpr = row_layout(s_x.shape[1], _WARPS)
    o_t = first + gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    p_x = row_pointers(p_x, o_t, stride, ring)[:, None] + o_d[None, :]
    async_load(s_x, p_x, mask=_within(o_t, oldest, rows, ring)[:, None])


@gluon.jit
def _async_copy_gates(s_f, p_f, i, first, oldest, rows, stride, SLOTS, ring):
    """Start an async copy of chunk i's gates to one of two pipeline stages; rows outside [oldest, rows) become 0."""
    BT: gl.constexpr = s_f.shape[1]
    M: gl.constexpr = s_f.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // M, M // 4], [_WARPS, 1], [1, 0])
    o_t = i * BT + gl.arange(0, BT, gl.SliceLayout(1, layout))
    o_m = gl.arange(0, M, gl.SliceLayout(0, layout))
    p_f = row_pointers(p_f, o_t, stride, ring)[:, None] + o_m[None, :]
    m_t = _within(o_t, oldest, rows, ring)
    async_load(s_f.index((i - first) % 2), p_f, mask=m_t[:, None] & (o_m < SLOTS)[None, :])


@gluon.jit
def _async_copy_chunk(s, t, r, i, first, last, oldest, entering, stride_k, stride_v, stride_f, SLOTS):
    """Start async copies of chunk i's keys and values, and of the gates of chunk i + 1; `s`, `t` and `r` are
    `_Tokens`."""
    BT: gl.constexpr = s.f.shape[1]
    stage = (i - first) % s.k.shape[0]
    rows = gl.where(i < last, entering, 0)
    _async_copy_rows(s.k.index(stage), t.k, i * BT, oldest, rows, stride_k, r.k)
    _async_copy_rows(s.v.index(stage), t.v, i * BT, oldest, rows, stride_v, r.v)
    _async_copy_gates(s.f, t.f, i + 1, first, oldest, gl.where(i + 1 < last, entering, 0), stride_f, SLOTS, r.f)
    async_copy.commit_group()


@gluon.jit
def _store_tile(p_x, s_x):
    """Copy an smem tile to global memory as a contiguous matrix."""
    layout: gl.constexpr = row_layout(s_x.shape[1], _WARPS)
    o_d = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))[:, None]
    o_m = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(p_x + o_d * s_x.shape[1] + o_m, s_x.load(layout))


@cached_launch
@gluon.jit(do_not_specialize=["NH", "entries", "segments"])
def hopper_slot_states_kernel(
    k, v, f, end, splits, initial_k, initial_v, cu_seqlens, local_k, local_v, local_g, states_k, states_v,
    final_k, final_v, ring_k, ring_v, ring_f, length, stride_initial_k, stride_initial_v, stride_ring_k, stride_ring_v,
    stride_ring_f, stride_length, slots, fresh, T, NH, H, before, window, entries, segments,
    M: gl.constexpr, SLOTS, K: gl.constexpr, V: gl.constexpr, NUM_STAGES: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """Store the slots before every chunk and after the last one, tiles `[entries, H, D, M]`, and each chunk's log2
    decay. Store 1 in `splits` for strong chunks, in which a slot decays by more than 80 bits, else 0.

    With LOCAL, compute instead the slots that each segment of chunks reaches from empty slots, and its decay. With
    `slots`, the initial and the final slots are a pool, as in `slot_states_kernel`.
    """
    BT: gl.constexpr = 64
    dtype: gl.constexpr = k.dtype.element_ty
    layout: gl.constexpr = _warpgroup_layout(BT, M)
    keys: gl.constexpr = _warpgroup_layout(K, M)
    values: gl.constexpr = _warpgroup_layout(V, M)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * M, 16)
    i_s, i_nh = gl.program_id(0) // NH, gl.program_id(0) % NH
    i_n, i_h = i_nh // H, i_nh % H
    if cu_seqlens is not None:
        begin = gl.load(cu_seqlens + i_n).to(gl.int64)
        tokens = (gl.load(cu_seqlens + i_n + 1) - begin).to(gl.int32)
    else:
        begin, tokens = i_n.to(gl.int64) * T, T
    at = Chunks(
        None, None, cu_seqlens, T, None, H, before, window, None, entries, 0, 0, slots, fresh, length, stride_length
    )  # fmt: skip
    entering = gl.maximum(tokens + before - window, 0)
    entry = first_entry(i_n, begin + i_n.to(gl.int64) * before, entries, cu_seqlens)
    slot, seen, oldest = earlier_tokens(i_n, at)
    begin = begin_of_keys(begin, i_n, at)
    chunks = gl.cdiv(entering, BT)
    per_segment = gl.cdiv(chunks, segments)
    first = i_s * per_segment
    last = gl.minimum(first + per_segment, chunks)
    begin = begin * H + i_h
    p_k, p_v, p_f = k + begin * K, v + begin * V, f + begin * SLOTS

    s_k = gl.allocate_shared_memory(dtype, [NUM_STAGES, BT, K], gl.NVMMASharedLayout(128, 16))
    s_v = gl.allocate_shared_memory(dtype, [NUM_STAGES, BT, V], gl.NVMMASharedLayout(128, 16))
    s_f = gl.allocate_shared_memory(f.dtype.element_ty, [2, BT, M], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    s_high = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_low = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_w = gl.allocate_shared_memory(dtype, [BT, M], swizzled)
    s_sk = gl.allocate_shared_memory(dtype, [K, M], swizzled)
    s_sv = gl.allocate_shared_memory(dtype, [V, M], swizzled)
    s_upper = gl.allocate_shared_memory(dtype, [BT, BT], gl.NVMMASharedLayout(128, 16))
    s_ones_k = gl.allocate_shared_memory(dtype, [K, BT], gl.NVMMASharedLayout(128, 16))
    s_ones_v = s_ones_k
    if V != K:
        s_ones_v = gl.allocate_shared_memory(dtype, [V, BT], gl.NVMMASharedLayout(128, 16))
    rings = _Tokens(
        Ring(ring_k, stride_ring_k, i_h * K, slot, seen, before),
        Ring(ring_v, stride_ring_v, i_h * V, slot, seen, before),
        Ring(ring_f, stride_ring_f, i_h * SLOTS, slot, seen, before),
    )
    _async_copy_gates(s_f, p_f, first, first, oldest, gl.where(first < last, entering, 0), H * SLOTS, SLOTS, rings.f)
    async_copy.commit_group()
    stages, rows = _Tokens(s_k, s_v, s_f), _Tokens(p_k, p_v, p_f)
    _async_copy_chunk(stages, rows, rings, first, first, last, oldest, entering, H * K, H * V, H * SLOTS, SLOTS)

    # offsets in chunk states [D, M], and in initial and final slots [M, D]
    o_km, o_vm = gl.arange(0, M, gl.SliceLayout(0, keys))[None, :], gl.arange(0, M, gl.SliceLayout(0, values))[None, :]
    o_k, o_v = gl.arange(0, K, gl.SliceLayout(1, keys))[:, None], gl.arange(0, V, gl.SliceLayout(1, values))[:, None]
    tile_k, tile_v = o_k * M + o_km, o_v * M + o_vm
    readable, writable = SLOTS, SLOTS
    if slots is not None:
        slot_k, slot_v = (i_h * SLOTS + o_km) * K + o_k, (i_h * SLOTS + o_vm) * V + o_v
        slot_k, slot_v = slot * stride_initial_k + slot_k, slot * stride_initial_v + slot_v
        writable = gl.where(slot >= 0, SLOTS, 0)
        readable = writable
        if fresh is not None:
            readable = gl.where(gl.load(fresh + i_n) != 0, 0, writable)
    else:
        slot_k = (i_nh.to(gl.int64) * SLOTS + o_km) * K + o_k
        slot_v = (i_nh.to(gl.int64) * SLOTS + o_vm) * V + o_v
    b_sk, b_sv = gl.zeros([K, M], gl.float32, keys), gl.zeros([V, M], gl.float32, values)
    b_total = gl.zeros([K, M], gl.float32, keys)
    if not LOCAL:
        if local_g is not None:
            index = (i_s * NH + i_nh).to(gl.int64)
            b_sk, b_sv = gl.load(local_k + index * K * M + tile_k), gl.load(local_v + index * V * M + tile_v)
        elif initial_k is not None:
            b_sk = gl.load(initial_k + slot_k, mask=o_km < readable, other=0.0)
            b_sv = gl.load(initial_v + slot_v, mask=o_vm < readable, other=0.0)

    lines: gl.constexpr = row_layout(BT, _WARPS)
    o_i, o_j = gl.arange(0, BT, gl.SliceLayout(1, lines))[:, None], gl.arange(0, BT, gl.SliceLayout(0, lines))[None, :]
    s_upper.store(gl.where(o_j > o_i, 1.0, 0.0).to(dtype))
    s_ones_k.store(gl.full([K, BT], 1.0, dtype, lines))
    if V != K:
        s_ones_v.store(gl.full([V, BT], 1.0, dtype, lines))
    wait_async_copies(1)
    b_f = s_f.index(0).load(layout).to(gl.float32)
    _store_hi_lo(b_f, s_high, s_low)
    fence_async_shared()
    barrier()
    for i in gl.static_range(1, NUM_STAGES - 1):
        _async_copy_chunk(stages, rows, rings, first + i, first, last, oldest, entering, H * K, H * V, H * SLOTS, SLOTS)
    # b_rest: sum of the log-gates of later tokens; b_end: sum over the whole chunk, for each row of the slots' layout
    b_rest, b_end = _sums(s_upper, s_high, s_low, layout), _sums(s_ones_k, s_high, s_low, keys)
    b_end_v = b_end
    if V != K:
        b_end_v = _sums(s_ones_v, s_high, s_low, values)
    b_rest, b_end, b_end_v = warpgroup_mma_wait(0, deps=[b_rest, b_end, b_end_v])
    s_w.store((enter_weight(b_f) * gl.exp2(b_rest)).to(dtype))
    for i in range(first, last):
        stage = (i - first) % NUM_STAGES
        tile = (entry + i) * H + i_h
        # wait until this chunk's keys and values are in smem; the barrier below frees the stage of the previous chunk
        wait_async_copies(NUM_STAGES - 2)
        b_f = s_f.index((i + 1 - first) % 2).load(layout).to(gl.float32)
        _store_hi_lo(b_f, s_high, s_low)
        if LOCAL:
            b_total += b_end
        else:
            s_sk.store(b_sk.to(dtype))
            s_sv.store(b_sv.to(dtype))
            gl.store(end + tile * M + o_km + o_k * 0, b_end, mask=o_k < 1)
            strong = (gl.min(b_end, 1) < -_LARGEST_FACTOR).to(gl.int32)
            o_1 = gl.arange(0, K, gl.SliceLayout(1, keys))
            gl.store(splits + tile + o_1 * 0, strong, mask=o_1 < 1)
        b_sk *= gl.exp2(b_end)
        b_sv *= gl.exp2(b_end_v)
        fence_async_shared()
        barrier()
        _async_copy_chunk(
            stages, rows, rings, i + NUM_STAGES - 1, first, last, oldest, entering, H * K, H * V, H * SLOTS, SLOTS
        )  # fmt: skip
        b_rest, b_end = _sums(s_upper, s_high, s_low, layout), _sums(s_ones_k, s_high, s_low, keys)
        b_end_v = b_end
        if V != K:
            b_end_v = _sums(s_ones_v, s_high, s_low, values)
        b_sk = warpgroup_mma(s_k.index(stage).permute((1, 0)), s_w, b_sk, is_async=True)
        b_sv = warpgroup_mma(s_v.index(stage).permute((1, 0)), s_w, b_sv, is_async=True)
        if not LOCAL:
            _store_tile(states_k + tile * K * M, s_sk)
            _store_tile(states_v + tile * V * M, s_sv)
        b_rest, b_end, b_end_v, b_sk, b_sv = warpgroup_mma_wait(0, deps=[b_rest, b_end, b_end_v, b_sk, b_sv])
        barrier()
        s_w.store((enter_weight(b_f) * gl.exp2(b_rest)).to(dtype))

    async_copy.wait_group(0)
    if LOCAL:
        index = (i_s * NH + i_nh).to(gl.int64)
        gl.store(local_k + index * K * M + tile_k, b_sk)
        gl.store(local_v + index * V * M + tile_v, b_sv)
        gl.store(local_g + index * M + o_km + o_k * 0, b_total, mask=o_k < 1)
    elif (last == chunks) & ((first < chunks) | (i_s == 0)):
        tile = (entry + chunks) * H + i_h
        gl.store(states_k + tile * K * M + tile_k, b_sk.to(dtype))
        gl.store(states_v + tile * V * M + tile_v, b_sv.to(dtype))
        gl.store(final_k + slot_k, b_sk, mask=o_km < writable)
        gl.store(final_v + slot_v, b_sv, mask=o_vm < writable)


def hopper_slot_states(launch, x: Inputs, y: Layout, results: Results, saved: Saved, pool: Pool | None = None) -> None:
    """Fill the slots before every chunk, `saved.end`, `saved.splits`, and the final slots in `results`.

    With `pool`, sequences start from its slots, and `results` has its tensors.
    """
    config = tuning.hopper_scan_config(y.N * y.H, y.entries)
    launch_scan(
        launch, hopper_slot_states_kernel, config, x, y, outer=(x.slots_k, x.slots_v), pool=pool,
        k=x.k if x.k_slots is None else x.k_slots, v=x.v, f=x.f, end=saved.end, splits=saved.splits,
        initial_k=x.slots_k, initial_v=x.slots_v, cu_seqlens=x.cu_seqlens, states_k=saved.states_k,
        states_v=saved.states_v, final_k=results.final_k, final_v=results.final_v, NUM_STAGES=config.num_stages,
        **pool_of_scan(x, pool, gates=True),
    )  # fmt: skip
