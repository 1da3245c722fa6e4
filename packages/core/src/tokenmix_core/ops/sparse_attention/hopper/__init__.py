"""Gluon kernels of attention over retained keys for Hopper: rows of listed keys are gathered to smem by cp.async."""

from torch import Tensor

from tokenmix_core.ops.softmax_attention.types import KeyLists

# tile of the backward kernels: 64 queries by 64 keys on one warpgroup
TILE = 64
WARPS = 4


def constants(q: Tensor, v: Tensor, keys: KeyLists) -> dict:
    """Return the constexprs that both backward kernels take."""
    return {
        **{"K": q.shape[3], "V": v.shape[3], "BT": TILE, "UNIT": keys.unit, "WINDOW": keys.window is not None},
        **{"PACKED": keys.cu_seqlens is not None, "num_warps": WARPS},
    }
