"""Attention with evicted keys: each block of queries has its own list of the keys that are not evicted yet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.sparse_attention import autograd
from tokenmix_core.ops.sparse_attention.reference import is_kept

# number of queries in a block; they share one list: the retained keys not yet evicted at the block's first query
BLOCK = 2048


def takes_blocks(x: autograd.Inputs) -> bool:
    """True if a list per block of queries saves work: keys are evicted, and there is more than one block of queries.

    False if gradients are wanted, which need the lists of the whole call; for packed sequences, each of which reads
    only its own keys' lists anyway; for the reference; and under torch.compile, whose graph would fix the number of
    blocks.
    """
    if x.until is None or x.cu_seqlens is not None or x.impl == "reference" or torch.compiler.is_compiling():
        return False
    differentiated = torch.is_grad_enabled() and any(y.requires_grad for y in (x.q, x.k, x.v, x.keep))
    return not differentiated and x.q.shape[1] > BLOCK


def kept_attention_by_blocks(x: autograd.Inputs) -> tuple[Tensor, Tensor]:
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]` of a call that `takes_blocks`, without gradients.

    Each block of queries is a separate call, with the keys up to the block's last query; keys evicted before the
    block's first query are not listed.
    """
    assert x.until is not None
    TQ, TK = x.q.shape[1], x.k.shape[1]
    ends = _ends_of_units(x.until, x.unit, *x.keep.shape[1:])
    outputs = []
    for first in range(0, TQ, BLOCK):
        stop = min(first + BLOCK, TQ)
        # positions count keys, and the last query is at the last key
        keys = max(0, TK - TQ + stop)
        units = cdiv(keys, x.unit)
        keep = is_kept(x.keep[:, :units]) & (ends[:, :units] > TK - TQ + first)
        part = x._replace(
            q=x.q[:, first:stop], k=x.k[:, :keys], v=x.v[:, :keys], keep=keep, until=x.until[:, :keys]
        )  # fmt: skip
        outputs.append(autograd.kept_attention(*part))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o, 1), torch.cat(lse, 2)


def _ends_of_units(until: Int[Tensor, "B TK H"], unit: int, units: int, heads: int) -> Int[Tensor, "B U HM"]:
    """Return for each unit (of `unit` keys) the first query that sees none of its keys as a retained key.

    The maximum is taken over the unit's keys and over the key heads that share a head of `keep`; `units` is U, `heads`
    is HM.
    """
    ends = until.unflatten(2, (heads, -1)).amax(3)
    if unit == 1:
        return ends
    return F.pad(ends, (0, 0, 0, units * unit - ends.shape[1])).unflatten(1, (units, unit)).amax(2)
