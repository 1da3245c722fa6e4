"""The mask of attention, lists of keys, and the properties of a call that select its implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Mask(NamedTuple):
    """The keys that a query sees: all keys, or with `causal` the keys up to its position.

    With a `window` (needs `causal`) a query sees the last `window` of these keys and the first `sinks` keys.
    """

    causal: bool
    window: int | None
    sinks: int


class Call(NamedTuple):
    """The properties of a call that select its implementation: device, dtype, sizes and mask."""

    device: str
    dtype: torch.dtype
    tq: int
    tk: int
    head_k: int
    head_v: int
    mask: Mask
    packed: bool = False
    # B · HQ if every query head has its own key head; None if heads share keys
    heads: int | None = None
    # B · HQ, even if heads share keys; 0 if no rule needs this number
    query_heads: int = 0
    # whether Gluon kernels run here and support the call's tensors
    gluon: bool = False


def call_of(q: Tensor, k: Tensor, v: Tensor, mask: Mask, packed: bool, gluon: bool = False) -> Call:
    """Return the `Call` of these tensors and options, by which the implementation is chosen."""
    (B, TQ, HQ, K), (TK, H), V = q.shape, k.shape[1:3], v.shape[3]
    return Call(q.device.type, q.dtype, TQ, TK, K, V, mask, packed, B * H if HQ == H else None, B * HQ, gluon)


class KeyLists(NamedTuple):
    """Lists of keys, and the mask: a query sees local keys, which end with its own, and listed keys before these.

    Attributes:
        ranks: number of listed units (runs of `unit` keys) before each unit, then the total, `[B, HM, U + 1]`, int32.
        lists: indices of the listed units, then of all other units, both ascending, `[B, HM, U]`, int32.
        until: first query that no longer sees the key as a listed one, `[B, TK, H]`; None: no key is evicted.
        cu_seqlens: boundaries of packed sequences, or None.
        unit: number of tokens of a unit: 1, or a multiple of 64.
        window: number of local keys, the query's own included; None: the keys of the query's own unit up to the query.
    """

    ranks: Tensor
    lists: Tensor
    until: Tensor | None
    cu_seqlens: Tensor | None
    unit: int
    window: int | None
