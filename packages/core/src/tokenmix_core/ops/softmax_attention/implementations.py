"""Load implementations by name; Triton and optional libraries are imported only when an implementation needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tokenmix_core.ops.softmax_attention import backends
from tokenmix_core.ops.softmax_attention.types import Mask


class Backend(NamedTuple):
    """The forward and the backward function of an implementation.

    Signatures: `forward(q, k, v, cu_seqlens, mask, scale) -> (o, lse [B, HQ, TQ])` and
    `backward(q, k, v, o, lse, do, dlse, cu_seqlens, mask, scale) -> (dq, dk, dv)`."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]


def load(impl: str | None) -> Backend:
    """Import an implementation; None and `OURS` stand for our kernels, in Gluon if Gluon runs."""
    if impl in (None, backends.OURS, "gluon", "triton"):
        impl = None if impl == backends.OURS else impl
        from tokenmix_core.ops.softmax_attention import backward, forward

        return Backend(
            functools.partial(forward.attention_forward, impl=impl),
            functools.partial(backward.attention_backward, impl=impl),
        )
    if impl == "sdpa":
        from tokenmix_core.ops.softmax_attention import sdpa

        return Backend(sdpa.forward, sdpa.backward)
    if impl == "flash_attn":
        from tokenmix_core.ops.softmax_attention import flash, flash4

        library = flash4 if backends.flash_attention() == 4 else flash
        return Backend(library.forward, library.backward)
    return Backend(_reference_forward, _reference_backward)


def load_decode(impl: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]:
    """Import the decoding functions of "triton" or "reference": from a cache of consecutive tokens, and from pages."""
    if impl == "triton":
        from tokenmix_core.ops.softmax_attention.decode import attention_decode, paged_attention_decode

        return attention_decode, paged_attention_decode
    from tokenmix_core.ops.softmax_attention.reference import (
        attention_decode_reference,
        paged_attention_decode_reference,
    )

    return attention_decode_reference, paged_attention_decode_reference


def _reference_forward(q, k, v, cu_seqlens, mask: Mask, scale):
    from tokenmix_core.ops.softmax_attention.reference import attention_reference

    o, lse = attention_reference(q, k, v, scale=scale, cu_seqlens=cu_seqlens, **mask._asdict())
    return o, lse.transpose(1, 2)


def _reference_backward(q, k, v, o, lse, do, dlse, cu_seqlens, mask: Mask, scale):
    from tokenmix_core.ops.softmax_attention.reference import attention_reference_backward

    dlse = None if dlse is None else dlse.transpose(1, 2)
    return attention_reference_backward(q, k, v, o, do, dlse, scale=scale, cu_seqlens=cu_seqlens, **mask._asdict())
