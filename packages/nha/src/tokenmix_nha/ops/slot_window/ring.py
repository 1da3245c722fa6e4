"""The kernel that stores the last tokens of sequences in the ring buffers of a pool."""

import triton
import triton.language as tl

from tokenmix_core.kernels import cached_launch, locate_slot
from tokenmix_nha.ops.slot_window import tile as tiles
from tokenmix_nha.ops.slot_window.types import Inputs, Layout, Pool, of_pool

# number of entries of a ring buffer that a program stores at once
_ENTRIES = 32


@triton.jit
def _copy(p, p_ring, o_t, o_w, m_t, m_w, stride, columns, BD: tl.constexpr):
    """Copy rows `o_t` of a matrix to rows `o_w` of a ring buffer; rows outside `m_t` become 0. `m_w`: rows to store."""
    o_d = tl.arange(0, BD)[None, :]
    m_d = o_d < columns
    b_x = tl.load(p + o_t.to(tl.int64)[:, None] * stride + o_d, mask=m_t[:, None] & m_d, other=0.0)
    tl.store(p_ring + o_w.to(tl.int64)[:, None] * stride + o_d, b_x, mask=m_w[:, None] & m_d)


@cached_launch
@triton.jit
def slot_ring_kernel(
    k, v, f, k_slots, ring_k, ring_v, ring_f, ring_k_slots, length, stride_ring_k, stride_ring_v, stride_ring_f,
    stride_ring_k_slots, stride_length, slots, fresh, cu_seqlens, T, H, window, SLOTS, M: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store the last tokens of one head of a sequence in its ring buffer, and add their number to `length`.

    Token j of a sequence has entry j mod `window`. If the sequence began in this call, the unused entries become zero.
    """
    i_n, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    slot, held = locate_slot(i_n, slots, fresh)
    if slot < 0:
        return
    begin, tokens = tiles.sequence_span(i_n, T, cu_seqlens)
    begin = begin * H + i_h
    p_length = length + slot * stride_length + i_h
    seen = tl.where(held, tl.load(p_length), 0)
    if ring_k is not None:
        for first in range(0, window, BN):
            o_w = first + tl.arange(0, BN)
            # the last of the call's tokens that has this entry; negative if none has it
            o_t = tokens - 1 - (seen + tokens - 1 - o_w + window) % window
            m_t = (o_t >= 0) & (o_w < window)
            m_w = (o_w < window) & (m_t | (o_w < tl.where(held, 0, window)))
            p_k, p_v, p_f = k + begin * K, v + begin * V, f + begin * SLOTS
            r_k, r_v = ring_k + slot * stride_ring_k + i_h * K, ring_v + slot * stride_ring_v + i_h * V
            _copy(p_k, r_k, o_t, o_w, m_t, m_w, H * K, K, K)
            _copy(p_v, r_v, o_t, o_w, m_t, m_w, H * V, V, V)
            _copy(p_f, ring_f + slot * stride_ring_f + i_h * SLOTS, o_t, o_w, m_t, m_w, H * SLOTS, SLOTS, M)
            if k_slots is not None:
                r_ks = ring_k_slots + slot * stride_ring_k_slots + i_h * K
                _copy(k_slots + begin * K, r_ks, o_t, o_w, m_t, m_w, H * K, K, K)
    tl.store(p_length, seen + tokens)


def store_rings(launch, x: Inputs, y: Layout, pool: Pool) -> None:
    """Store each sequence's last tokens in its ring buffer, after all other kernels of the call have read it."""
    launch(
        slot_ring_kernel, (y.N * y.H,),
        k=x.k, v=x.v, f=x.f, k_slots=x.k_slots, **of_pool(pool, "ring_k", "ring_v", "ring_f", "ring_k_slots"),
        cu_seqlens=x.cu_seqlens, T=y.T, H=y.H, window=y.window, SLOTS=y.SLOTS, M=y.M, K=y.K, V=y.V, BN=_ENTRIES,
        num_warps=4,
    )  # fmt: skip
