"""The kernels of attention over kept keys for Hopper, in Gluon: listed rows go straight to shared memory."""

from torch import Tensor

# of the backward kernels: queries that meet as many keys on four warps
TILE = 64
WARPS = 4


def constants(q: Tensor, v: Tensor, unit: int, window: int | None, cu_seqlens: Tensor | None) -> dict:
    """The constants that the backward kernels are compiled for."""
    return {
        **{"K": q.shape[3], "V": v.shape[3], "BT": TILE, "UNIT": unit, "WINDOW": window is not None},
        **{"PACKED": cu_seqlens is not None, "num_warps": WARPS},
    }
