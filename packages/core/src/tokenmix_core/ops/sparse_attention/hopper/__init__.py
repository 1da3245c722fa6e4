"""Gluon kernels of attention over retained keys for Hopper: listed rows are gathered to smem by cp.async."""

from torch import Tensor

# BM = BN of the backward kernels, on one warpgroup
TILE = 64
WARPS = 4


def constants(q: Tensor, v: Tensor, unit: int, window: int | None, cu_seqlens: Tensor | None) -> dict:
    """Return the constexprs of the backward kernels."""
    return {
        **{"K": q.shape[3], "V": v.shape[3], "BT": TILE, "UNIT": unit, "WINDOW": window is not None},
        **{"PACKED": cu_seqlens is not None, "num_warps": WARPS},
    }
