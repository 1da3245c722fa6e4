"""The share ω_L of attention that goes to the slots (equation 5), collected while layers run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_nha.heads import Call, Heads
from tokenmix_nha.ops.gla.scan import GatedScan
from tokenmix_nha.ops.slot_window.prefix import share_of_zeros

if TYPE_CHECKING:
    from tokenmix_nha.mixer import NhaMixer


@contextmanager
def observed_shares(mixers: list[NhaMixer]) -> Iterator[list[list[Tensor]]]:
    """Collect ω_L `[B, T, HQ]` of calls without a cache inside the `with`: one list per mixer, one entry per call."""
    for mixer in mixers:
        mixer.shares = []
    try:
        yield [mixer.shares for mixer in mixers if mixer.shares is not None]
    finally:
        for mixer in mixers:
            mixer.shares = None


def share_of_slots(mixer: NhaMixer, heads: Heads, call: Call) -> Float[Tensor, "B T HQ"]:
    """Return ω_L of a call without a cache: the share that one softmax gives the slots, or their weight in a sum.

    The fused operation does not return the share, so this function recomputes the slots' logits by a recurrence in
    plain PyTorch on every device.
    """
    shape = heads.q.shape[:3]
    if not mixer.slots or mixer.window == 0:
        return heads.q.new_full(shape, 1.0 if mixer.slots else 0.0)
    if heads.weight is not None:
        return heads.weight.expand(shape)
    lse = mixer.attend_to_window(heads, call).lse
    if heads.f is None:
        return share_of_zeros(lse, mixer.slots)
    _, entering = mixer.entering(heads, call)
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    q, k, f = (x.to(wide) for x in (heads.q_slots, entering.k, entering.f))
    logits = q.shape[-1] ** -0.5 * GatedScan(-f.expm1(), k, f, None, call.cu_seqlens).columns(q)
    return (logits.logsumexp(-1) - lse.to(wide)).sigmoid()
