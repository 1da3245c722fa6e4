"""The decoding step: one kernel updates slots and ring buffer and attends to both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_core.ops import AttentionOutput, attention_decode, merge_attention
from tokenmix_nha.ops.forget_gates.kernels import log_sigmoid
from tokenmix_nha.ops.slot_window.state import SlotWindowState
from tokenmix_nha.ops.slot_window.tile import LN_2, enter_weight

# maximum size of a ring buffer, in tokens, to which this kernel attends; above it, core's split-KV decoding attends,
# which takes no slots
_RING_INSIDE = 512


@cached_launch
@triton.jit
def slot_window_step_kernel(
    q, k, v, f, q_slots, k_slots, slots_k, slots_v, ring_k, ring_v, ring_f, ring_k_slots, length, o, lse,
    slots, stride_slots_k, stride_slots_v, stride_ring_k, stride_ring_v, stride_ring_f, stride_ring_k_slots,
    stride_length, scale, inverse, window, H,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    LOGITS: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_RING: tl.constexpr, READ_RING: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Update slots and ring buffer of one key head of one sequence; store o and the log-sum-exp of its query heads.

    LOGITS: whether `f` has logits instead of log-gates. HAS_RING: whether there is a ring buffer (the window is not 0);
    READ_RING: whether queries attend to it and to the new token. Each head has a `length` counter of its own, because a
    shared one would need synchronisation between programs. With `slots`, the states are pools, and a row with a
    negative slot is padding.
    """
    if PDL:
        gdc_launch_dependents()
    i_nh = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    o_m, o_k, o_v, o_n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, V), tl.arange(0, BN)
    # load the slots, most of the bytes, before `gdc_wait`: no other kernel of a decoding step writes slots, and steps
    # do not overlap (see `launch.pdl`)
    i_s = i_n
    if slots is not None:
        i_s = tl.load(slots + i_n).to(tl.int64)
        if i_s < 0:
            if PDL:
                gdc_wait()
            for i_g in range(GROUP):
                tl.store(o + (i_nh * GROUP + i_g) * V + o_v, tl.zeros([V], o.dtype.element_ty))
            return
    ring_k += i_s * stride_ring_k
    ring_v += i_s * stride_ring_v
    ring_f += i_s * stride_ring_f
    if OWN_SLOT_KEYS:
        ring_k_slots += i_s * stride_ring_k_slots
    p_length = length + i_s * stride_length + i_h
    p_sk = slots_k + i_s * stride_slots_k + i_h * M * K + o_m[:, None] * K + o_k[None, :]
    p_sv = slots_v + i_s * stride_slots_v + i_h * M * V + o_m[:, None] * V + o_v[None, :]
    b_sk, b_sv = tl.load(p_sk), tl.load(p_sv)
    if PDL:
        gdc_wait()
    b_k, b_v = tl.load(k + i_nh * K + o_k), tl.load(v + i_nh * V + o_v)
    b_ks = b_k
    if OWN_SLOT_KEYS:
        b_ks = tl.load(k_slots + i_nh * K + o_k)
    b_f = tl.load(f + i_nh * M + o_m)
    if LOGITS:
        b_f = log_sigmoid(b_f.to(tl.float32)) * inverse

    i_ring = 0
    seen = tl.load(p_length)
    b_in_k, b_in_v, b_in_f = b_ks, b_v, b_f
    if HAS_RING:
        # the oldest token enters the slots, and the new token takes its entry in the ring buffer
        i_ring = seen % window
        ring = i_ring.to(tl.int64) * H + i_h
        leaving = tl.where(seen >= window, M, 0)
        b_in_f = tl.load(ring_f + ring * M + o_m, mask=o_m < leaving, other=0.0)
        b_in_v = tl.load(ring_v + ring * V + o_v)
        if OWN_SLOT_KEYS:
            b_in_k = tl.load(ring_k_slots + ring * K + o_k)
        else:
            b_in_k = tl.load(ring_k + ring * K + o_k)
        # before a thread overwrites the oldest token, all threads must have loaded it
        tl.debug_barrier()
        tl.store(ring_k + ring * K + o_k, b_k)
        tl.store(ring_v + ring * V + o_v, b_v)
        tl.store(ring_f + ring * M + o_m, b_f)
        if OWN_SLOT_KEYS:
            tl.store(ring_k_slots + ring * K + o_k, b_ks)

    b_in_f = b_in_f.to(tl.float32)
    b_decay, b_enter = tl.exp2(b_in_f * LOG2_E)[:, None], enter_weight(b_in_f)[:, None]
    b_sk = b_sk * b_decay + b_enter * b_in_k.to(tl.float32)[None, :]
    b_sv = b_sv * b_decay + b_enter * b_in_v.to(tl.float32)[None, :]
    tl.store(p_sk, b_sk)
    tl.store(p_sv, b_sv)

    scale *= LOG2_E
    for i_g in range(GROUP):
        i_q = i_nh * GROUP + i_g
        b_q = tl.load(q + i_q * K + o_k).to(tl.float32) * scale
        b_qs = b_q
        if OWN_SLOT_KEYS:
            b_qs = tl.load(q_slots + i_q * K + o_k).to(tl.float32) * scale
        b_z = tl.sum(b_sk * b_qs[None, :], 1)
        b_max = tl.max(b_z, 0)
        b_new = float("-inf")
        if READ_RING:
            b_new = tl.sum(b_q * b_k.to(tl.float32), 0)
            b_max = tl.maximum(b_max, b_new)
        b_z = tl.exp2(b_z - b_max)
        b_l = tl.sum(b_z, 0)
        b_o = tl.sum(b_z[:, None] * b_sv, 0)
        if READ_RING:
            b_l += tl.exp2(b_new - b_max)
            b_o += tl.exp2(b_new - b_max) * b_v.to(tl.float32)
            for first in range(0, tl.minimum(window, seen), BN):
                o_i = first + o_n
                m_i = (o_i < window) & (o_i < seen) & (o_i != i_ring)
                o_r = (o_i.to(tl.int64) * H + i_h)[:, None]
                b_s = tl.sum(tl.load(ring_k + o_r * K + o_k[None, :], mask=m_i[:, None], other=0.0) * b_q[None, :], 1)
                b_s = tl.where(m_i, b_s, float("-inf"))
                b_top = tl.maximum(b_max, tl.max(b_s, 0))
                b_s = tl.exp2(b_s - b_top)
                b_shrink = tl.exp2(b_max - b_top)
                b_l = b_l * b_shrink + tl.sum(b_s, 0)
                b_vn = tl.load(ring_v + o_r * V + o_v[None, :], mask=m_i[:, None], other=0.0)
                b_o = b_o * b_shrink + tl.sum(b_s[:, None] * b_vn, 0)
                b_max = b_top
        tl.store(o + i_q * V + o_v, (b_o / b_l).to(o.dtype.element_ty))
        tl.store(lse + i_q, (b_max + tl.log2(b_l)) * LN_2)
    # no thread loads `length` after this store: with a ring buffer, the barrier above guarantees this; without one,
    # only the storing thread loads `length`
    tl.store(p_length, seen + 1)


@torch.library.custom_op(
    "tokenmix_nha::slot_window_step",
    mutates_args=("slots_k", "slots_v", "ring_k", "ring_v", "ring_f", "ring_k_slots", "length"),
)
def _step_op(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, q_slots: Tensor | None, k_slots: Tensor | None, slots_k: Tensor,
    slots_v: Tensor, ring_k: Tensor, ring_v: Tensor, ring_f: Tensor, ring_k_slots: Tensor | None, length: Tensor,
    slots: Tensor | None, scale: float, normalizer: float | None, read_ring: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Update the state; return o `[B, HQ, V]` and lse `[B, HQ]` over the slots and, if `read_ring`, the ring buffer."""
    o, lse = _step_outputs(q, k, v)
    window, heads = ring_k.shape[1:3]
    M = slots_k.shape[2]
    states = {"slots_k": slots_k, "slots_v": slots_v, "ring_k": ring_k, "ring_v": ring_v, "ring_f": ring_f}
    states |= {"ring_k_slots": ring_k_slots, "length": length}
    strides = {f"stride_{name}": None if x is None else x.stride(0) for name, x in states.items()}
    # Triton launches on the current device, which may not be the device of the tensors
    with torch.cuda.device_of(q):
        slot_window_step_kernel[(len(q) * heads,)](
            q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots, **states, **strides, o=o, lse=lse, slots=slots,
            scale=scale, inverse=1 / (normalizer or 1.0), window=window, H=heads, M=M, K=k.shape[2], V=v.shape[2],
            BN=32, GROUP=q.shape[1] // heads, LOGITS=normalizer is not None, OWN_SLOT_KEYS=k_slots is not None,
            HAS_RING=window > 0, READ_RING=read_ring, num_warps=8 if M == 128 else 4,
        )  # fmt: skip
    return o, lse


@_step_op.register_fake
def _step_outputs(q, k, v, *_):
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


def step_triton(
    q, k, v, f, q_slots, k_slots, state: SlotWindowState, scale: float, normalizer: float | None, slots: Tensor | None
) -> Tensor:
    """Update `state`, or its `slots`, by one token and return o `[B, HQ, V]`."""
    inside = slots is not None or state.window <= _RING_INSIDE
    token = dict(q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots)
    o, lse = _step_op(
        **{name: None if x is None else x.contiguous() for name, x in token.items()},
        slots_k=state.slots_k, slots_v=state.slots_v, ring_k=state.k, ring_v=state.v, ring_f=state.f,
        ring_k_slots=state.k_slots, length=state.length, slots=None if slots is None else slots.contiguous(),
        scale=scale, normalizer=normalizer, read_ring=state.window > 0 and inside,
    )  # fmt: skip
    if not inside:
        # decoding attention can read the ring buffer as a KV cache: the newest token sees all of its keys, in any order
        keys = state.length[:, 0].clamp(max=state.window)
        ring = attention_decode(q.unsqueeze(1), state.k, state.v, keys, scale=scale)
        o = merge_attention([AttentionOutput(o.unsqueeze(1), lse.unsqueeze(1)), ring]).o.squeeze(1)
    return o
