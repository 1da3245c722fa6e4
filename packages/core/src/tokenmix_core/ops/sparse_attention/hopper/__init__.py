"""Gluon kernels of attention over retained keys for Hopper: listed rows are gathered to smem by cp.async."""

from torch import Tensor

from tokenmix_core.ops.softmax_attention.types import KeyLists

# BM = BN of the backward kernels, on one warpgroup
TILE = 64
WARPS = 4


def constants(q: Tensor, v: Tensor, keys: KeyLists) -> dict:
    """Return the constexprs of the backward kernels."""
    return {
        **{"K": q.shape[3], "V": v.shape[3], "BT": TILE, "UNIT": keys.unit, "WINDOW": keys.window is not None},
        **{"PACKED": keys.cu_seqlens is not None, "num_warps": WARPS},
    }
