"""Arguments of kernel launches: strides, sizes and constexprs, keyed by the kernels' parameter names."""

from __future__ import annotations

import torch

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.ops.softmax_attention.tuning import AttentionTile
from tokenmix_core.ops.softmax_attention.types import KeyLists, Mask


def strides(**tensors: torch.Tensor | None) -> dict[str, int]:
    """Return batch, token and head strides, keyed by the kernels' parameter names; 0 for a tensor that is None."""
    steps = {name: (0, 0, 0) if x is None else x.stride()[:3] for name, x in tensors.items()}
    return {f"s_{name}{axis}": step for name in steps for axis, step in zip("bth", steps[name], strict=True)}


def sizes(q, k, cu_seqlens, mask: Mask) -> dict[str, int | None]:
    """Return the sizes and mask of a call, keyed by the kernels' parameter names."""
    (_, TQ, HQ, _), (_, TK, H, _) = q.shape, k.shape
    N = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    return {"TQ": TQ, "TK": TK, "HQ": HQ, "H": H, "N": N, "window": mask.window or 0, "sinks": mask.sinks or None}


def constants(q, v, cu_seqlens, mask: Mask, tile: AttentionTile) -> dict:
    """Return the constexprs that all kernels of a call share."""
    K, V = q.shape[3], v.shape[3]
    return {
        **{"K": K, "V": V, "BM": tile.BM, "BN": tile.BN, "BK": block_size(K), "BV": block_size(V)},
        **{"CAUSAL": mask.causal, "WINDOW": mask.window is not None, "PACKED": cu_seqlens is not None},
        **{"PRECISION": precision(q.dtype), "num_warps": tile.num_warps, "num_stages": tile.num_stages},
    }


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x if the elements of a head are contiguous, else a copy. All other strides may have any value."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block_size(size: int) -> int:
    """Return the tile width for `size` columns: the next power of two, but at least 16, the minimum of an MMA."""
    return max(16, next_power_of_2(size))


def sink_step(q: torch.Tensor, mask: Mask, BN: int) -> int:
    """Return the tile width of the extra step over a window's sinks: 0 (no step) without sinks or if BN is no wider."""
    step = block_size(mask.sinks)
    if mask.window is None or not mask.sinks or step >= BN:
        return 0
    return step


def precision(dtype: torch.dtype) -> str:
    """Return the MMA precision: no tf32 on ROCm, nor for float32 inputs, as tf32 would lose half of the digits."""
    return "ieee" if dtype == torch.float32 or torch.version.hip else "tf32"


def listed_sizes(q, k, keys: KeyLists) -> dict[str, int]:
    """Return the sizes and mask of a call over the listed keys of `KeyLists`, keyed by the kernels' parameter names."""
    (_, TQ, HQ, _), (_, TK, H, _), (_, HM, U) = q.shape, k.shape, keys.lists.shape
    N = 0 if keys.cu_seqlens is None else len(keys.cu_seqlens) - 1
    return {"TQ": TQ, "TK": TK, "U": U, "HQ": HQ, "H": H, "HM": HM, "N": N, "window": keys.window or 0}


def listed_constants(q, v, tile: AttentionTile, keys: KeyLists) -> dict:
    """Return the constexprs that all kernels over the listed keys of `KeyLists` share."""
    given = constants(q, v, keys.cu_seqlens, Mask(True, keys.window, 0), tile)
    del given["CAUSAL"]
    return given | {"UNIT": keys.unit, "maxnreg": tile.maxnreg}
