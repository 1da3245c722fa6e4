"""Run FlashAttention-4 from the package flash-attn-4, by its private functions, which take and return lse.

Its backward takes the gradient of the log-sum-exp, and sums dq by atomics in a different order in every run, unless
`torch.use_deterministic_algorithms(True)` asks for a fixed order, which is slower.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from tokenmix_core.kernels.launch.cache.capture import launches_unseen
from tokenmix_core.ops.softmax_attention.flash import boundaries, readable, window_sides
from tokenmix_core.ops.softmax_attention.types import Mask

# the parameters that this module passes to each private function of flash-attn-4; other versions may lack some
_PARAMETERS = {
    "_flash_attn_fwd": {"softmax_scale", "causal", "window_size_left", "window_size_right", "cu_seqlens_q",
                        "cu_seqlens_k", "return_lse"},
    "_flash_attn_bwd": {"softmax_scale", "causal", "window_size_left", "window_size_right", "cu_seqlens_q",
                        "cu_seqlens_k", "deterministic", "dq", "dk", "dv", "dlse"},
}  # fmt: skip


@functools.cache
def is_here() -> bool:
    """True if the package is installed and its functions have the `_PARAMETERS`; warn if it is installed but unfit.

    The module's existence proves nothing, since flash-attn 2 contains an early version under the same name.
    """
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        return False
    try:
        from flash_attn.cute import interface as fa  # pyright: ignore[reportMissingImports]

        lacking = [
            f"{name}({parameter})"
            for name, parameters in _PARAMETERS.items()
            for parameter in sorted(parameters - inspect.signature(getattr(fa, name)).parameters.keys())
        ]
        why = f"it has no {lacking[0]}" if lacking else None
    # the package's own imports may fail with any exception
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if why is not None:
        warnings.warn(f"attention: flash-attn-4 {installed} is installed but not used: {why}", stacklevel=2)
    return why is None


def forward(q, k, v, cu_seqlens, mask: Mask, scale):
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`."""
    from flash_attn.cute import interface as fa  # pyright: ignore[reportMissingImports]

    q, k, v = (readable(x) for x in (q, k, v))
    cu, *_ = boundaries(q, k, cu_seqlens)
    q, k, v = (_rows(x, cu) for x in (q, k, v))
    launches_unseen()
    o, lse, *_ = fa._flash_attn_fwd(q, k, v, return_lse=True, **_options(mask, scale, cu))
    return (o, lse) if cu is None else (o.unsqueeze(0), lse.unsqueeze(0))


def backward(q, k, v, o, lse, do, dlse, cu_seqlens, mask: Mask, scale):
    """Return dq, dk and dv."""
    from flash_attn.cute import interface as fa  # pyright: ignore[reportMissingImports]

    q, k, v, do = (readable(x) for x in (q, k, v, do))
    cu, *_ = boundaries(q, k, cu_seqlens)
    dlse = None if dlse is None else _rows(dlse.contiguous(), cu)
    q, k, v, o, lse, do = (_rows(x, cu) for x in (q, k, v, o, lse, do))
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    launches_unseen()
    fa._flash_attn_bwd(
        q, k, v, o, do, lse, dq=grads[0], dk=grads[1], dv=grads[2], dlse=dlse,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_options(mask, scale, cu),
    )  # fmt: skip
    return tuple(x if cu is None else x.unsqueeze(0) for x in grads)


def _rows(x: Tensor, cu: Tensor | None) -> Tensor:
    """Return x, without its batch dimension if the batch is packed (`cu` is given)."""
    return x if cu is None else x.squeeze(0)


def _options(mask: Mask, scale: float, cu: Tensor | None) -> dict:
    """Return the keyword arguments that both passes share. Lengths of packed sequences are not read on the host."""
    left, right = window_sides(mask)
    return {
        "softmax_scale": scale, "causal": mask.causal, "window_size_left": left, "window_size_right": right,
        "cu_seqlens_q": cu, "cu_seqlens_k": cu,
    }  # fmt: skip
