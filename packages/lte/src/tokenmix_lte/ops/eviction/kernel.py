"""Triton kernel of the eviction step: one launch, with one program for each row and head."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.kernels import cached_launch, gdc_launch_and_wait

# maximum number of retained tokens whose scores one warp holds in registers
_SLOTS_PER_WARP = 512


@cached_launch
@triton.jit
def evict_step_kernel(
    k, v, raw, keys, values, lengths, scores, ages, raws, before, window, sinks, cap, reach, H, K,
    BC: tl.constexpr, BK: tl.constexpr, UNIFORM: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Retain or drop the token that leaves the ring buffer, depending on its score, and write the new token.

    UNIFORM: score tokens by the largest power of two that divides their position, instead of by `scores`. reach: P, the
    number of keys in `raws`.

    slots of a head:  [ ring: W slots, position p at p mod W | retained: cap slots, `n_retained` filled ]
                        new token → slot p mod W               leaving token → `target`, if `enters`
    """
    gdc_launch_and_wait(PDL)
    i_nh = tl.program_id(0).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    o_c, o_k = tl.arange(0, BC), tl.arange(0, BK)
    m_c, m_k = o_c < cap, o_k < K
    position = tl.load(before + i_n).to(tl.int64)
    length = tl.load(lengths + i_nh)
    slot, age = position % window, position - window
    p_scores = scores + i_nh * (window + cap)
    p_ring, p_retained = (i_nh * (window + cap) + slot) * K + o_k, (i_nh * (window + cap) + window) * K + o_k
    b_key = tl.load(keys + p_ring, mask=m_k)
    b_value = tl.load(values + p_ring, mask=m_k)
    if UNIFORM:
        # exponent of the largest power of two that divides the token's position, read from the float32's exponent bits
        exponent = (age & (0 - age)).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        score = tl.where(age == 0, float("inf"), (exponent - 126).to(tl.float32))
    else:
        score = tl.load(p_scores + slot)
    score = tl.where(age < sinks, float("inf"), score)
    n_retained = length - tl.minimum(position, window).to(tl.int32)
    b_scores = tl.load(p_scores + window + o_c, mask=m_c & (o_c < n_retained), other=float("inf"))
    lowest = tl.min(b_scores, 0)
    b_ages = tl.load(ages + i_nh * cap + o_c, mask=m_c & (o_c < n_retained) & (b_scores == lowest), other=-1)
    free = n_retained < cap
    enters = (age >= 0) & (score > 0) & (free | (score > lowest))
    target = tl.where(free, n_retained, tl.argmax(b_ages, 0)).to(tl.int64)
    b_enters = m_k & (tl.zeros([BK], tl.int32) + enters.to(tl.int32) > 0)
    tl.store(keys + p_retained + target * K, b_key, mask=b_enters)
    tl.store(values + p_retained + target * K, b_value, mask=b_enters)
    tl.store(p_scores + window + target, score, mask=enters)
    tl.store(ages + i_nh * cap + target, age.to(tl.int32), mask=enters)
    tl.store(keys + p_ring, tl.load(k + i_nh * K + o_k, mask=m_k), mask=m_k)
    tl.store(values + p_ring, tl.load(v + i_nh * K + o_k, mask=m_k), mask=m_k)
    if reach > 0:
        p_raw = ((i_n * reach + position % reach) * H + i_h) * K + o_k
        tl.store(raws + p_raw, tl.load(raw + i_nh * K + o_k, mask=m_k), mask=m_k)
    tl.store(lengths + i_nh, length + (enters & free).to(tl.int32) + (age < 0).to(tl.int32))


def run(k, v, raw, keys, values, lengths, scores, ages, raws, before, window, sinks, uniform) -> None:
    """Launch the kernel of `evict_step`; all tensors must be contiguous."""
    N, H, K = k.shape
    cap = scores.shape[2] - window
    BC = next_power_of_2(cap)
    # the kernel needs no barrier: the same threads load and store a token's elements, and the reduction over retained
    # scores comes after all loads of scores
    evict_step_kernel[(N * H,)](
        k=k, v=v, raw=raw, keys=keys, values=values, lengths=lengths, scores=scores, ages=ages, raws=raws,
        before=before, window=window, sinks=sinks, cap=cap, reach=raws.shape[1], H=H, K=K,
        BC=BC, BK=next_power_of_2(K), UNIFORM=uniform, num_warps=1 if BC <= _SLOTS_PER_WARP else 4,
    )  # fmt: skip
