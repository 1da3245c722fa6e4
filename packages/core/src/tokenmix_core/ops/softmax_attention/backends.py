"""Limits of the attention implementations, and the rules that select one for the forward and the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from tokenmix_core._utils.optional import is_installed
from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.compat import constant_when_traced
from tokenmix_core.ops.dispatch import NOT_INTERPRETED, kernels_run
from tokenmix_core.ops.softmax_attention.types import Call, Mask, call_of

_HALF = (torch.bfloat16, torch.float16)

AttentionImpl = Literal["gluon", "triton", "sdpa", "flash_attn", "reference"]
IMPLS: tuple[str, ...] = get_args(AttentionImpl)
# internal name of an implementation: our kernels for both passes, in Gluon if Gluon runs; with `impl=None` another
# library may run the backward pass
OURS = "ours"

# minimum number of queries per batch row with which other libraries are faster than our kernels in causal attention
# without a window
_LONG = 128
# maximum number of blocks of 64 queries with which other libraries are not faster: below one block per SM, latency
# determines the time
_FEW_BLOCKS = 128
# FlashAttention-4 is fastest from this number of blocks of 64 queries on, if a window (if any) has _WIDE or more keys
_MANY_BLOCKS = 8192
_WIDE = 1024
# maximum size of a window's mask on a CPU, in elements: 64 MiB in float32
_MASK_ELEMENTS = 1 << 24

_REFERENCE = "pass impl='reference'"


@functools.cache
def cudnn_heads() -> int:
    """Return the largest head size that torch's cuDNN attention supports on every CUDA device.

    The result is 0 if cuDNN is missing or a device is older than Hopper, where cuDNN is not faster.
    """
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return 0
    oldest = _oldest()
    if oldest < (9, 0):
        return 0
    # torch permits heads of more than 128 on Hopper only
    return 256 if oldest == (9, 0) and (torch.backends.cudnn.version() or 0) >= 91000 else 128


@constant_when_traced
def flash_attention() -> int:
    """Return the version of FlashAttention for "flash_attn": 4 if installed and all GPUs support it, else 2, else 0."""
    from tokenmix_core.ops.softmax_attention.flash4 import is_here

    if (9, 0) <= _oldest() < (12, 0) and is_here():
        return 4
    return 2 if _has_flash_attention_2() else 0


# the search for the package reads folders, and a call with new lengths asks for it
@functools.cache
def _has_flash_attention_2() -> bool:
    return is_installed("flash_attn")


@functools.cache
def _oldest() -> tuple[int, int]:
    """Return the lowest compute capability of all CUDA devices; (0, 0) without a CUDA device."""
    if not torch.cuda.is_available():
        return 0, 0
    return min(torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))


@constant_when_traced
def on_hopper() -> bool:
    """True if every CUDA device is a Hopper GPU."""
    return (9, 0) <= _oldest() < (10, 0)


def takes_cudnn(tq: int, tk: int, head_k: int, head_v: int, mask: Mask, packed: bool) -> bool:
    """True if cuDNN supports this attention of 16-bit CUDA tensors.

    cuDNN needs at least two queries (as many as keys if causal), no window, an unpacked batch, and head sizes that are
    multiples of 8, at most `cudnn_heads`.
    """
    plain = mask.window is None and not packed and (tq == tk or not mask.causal) and tq > 1
    return plain and head_k % 8 == head_v % 8 == 0 and max(head_k, head_v) <= cudnn_heads()


def by_cudnn(impl: str | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask, packed: bool) -> bool:
    """True if cuDNN runs the forward or the backward pass of a 16-bit CUDA call whose forward pass runs `impl`."""
    call = call_of(q, k, v, mask, packed)
    return backward_impl(impl, call, False) == "sdpa" and call.dtype in _HALF and takes_cudnn(*call[2:8])


def limit(impl: str, call: Call) -> str | None:
    """Return why `impl` does not support the call, and an alternative, as a phrase; None if it supports the call."""
    return _LIMITS[impl](call)


def choose_impl(call: Call) -> str:
    """Return the fastest implementation that supports the call.

    On CUDA this is the first of the following that supports the call:

    - "flash_attn" on Hopper with FlashAttention-4, for large calls with heads of 128 and no sinks, and with no window
      or, if unpacked, a wide one;
    - "triton", our kernels, if Gluon runs;
    - "sdpa" for plain attention (16-bit, unpacked, no window, at least 128 queries aligned with the keys), also with
      K ≠ V up to cuDNN's largest head; but not for calls too small to fill the GPU, if no heads share keys and K ≤ 128;
    - "triton" for all other calls that our kernels support;
    - "reference" (heads beyond 256, float64).

    On a CPU: "sdpa" if it supports the call and there is no window, or the window's mask is small; else "reference".
    `backward_impl` selects the backward pass. flash-attn 2 runs only by name, since no call is known for which it is
    the fastest.
    """
    if call.device == "cuda":
        order = ("sdpa", "triton") if _is_for_cudnn(call) and not call.gluon else ("triton",)
        if _is_for_flash_attention_4(call) and call.head_k == 128 and not (call.packed and call.mask.window):
            order = ("flash_attn", *order)
    else:
        order = ("sdpa",) if call.mask.window is None or call.tq * call.tk <= _MASK_ELEMENTS else ()
    return next((impl for impl in order if limit(impl, call) is None), "reference")


def _is_for_cudnn(call: Call) -> bool:
    """True for large unpacked calls without a window and, if causal, with TQ = TK.

    cuDNN is then faster than portable kernels.
    """
    plain = call.mask.window is None and not call.packed and call.tq >= _LONG
    plain = plain and (call.tq == call.tk or not call.mask.causal)
    small = call.heads is not None and call.heads * cdiv(call.tq, 64) <= _FEW_BLOCKS and call.head_k <= 128
    return plain and not small


def _is_for_flash_attention_4(call: Call) -> bool:
    """True if FlashAttention-4 is installed, supports the call, and is the fastest in at least one pass on Hopper."""
    wide = call.mask.window is None or call.mask.window >= _WIDE
    many = call.tq == call.tk and call.query_heads * cdiv(call.tq, 64) >= _MANY_BLOCKS
    heads = call.head_k == call.head_v and call.head_k in (64, 128)
    here = on_hopper() and flash_attention() == 4
    return here and wide and many and heads and limit("flash_attn", call) is None


def backward_impl(impl: str | None, call: Call, through_lse: bool) -> str | None:
    """Return the implementation of the backward pass after a forward pass by `impl`; None: our kernels.

    `through_lse` is True if the log-sum-exp has a gradient.

    Both passes use one implementation, unless the log-sum-exp has a gradient that this implementation does not take.
    If `impl` is None, the fastest one runs. In 16 bits this is FlashAttention-4 for large calls, but not for heads of
    64 with a window or packed sequences, nor for heads of 128 with both; else cuDNN for calls as in `_is_for_cudnn`,
    but not for heads of 64, nor if `through_lse`; else our kernels.
    """
    if through_lse and (impl == "sdpa" or (impl == "flash_attn" and flash_attention() != 4)):
        return None if call.device == "cuda" else "reference"
    if impl is None and call.dtype in _HALF:
        ours_lead = (call.head_k == 64) + (call.mask.window is not None) + call.packed > 1
        if _is_for_flash_attention_4(call) and not ours_lead:
            return "flash_attn"
        # `impl` None means that our forward pass ran in Gluon: without Gluon, cuDNN would have run the forward pass too
        if call.head_k != 64 and not through_lse and _is_for_cudnn(call) and takes_cudnn(*call[2:8]):
            return "sdpa"
    return impl


def _triton_limit(call: Call) -> str | None:
    if not kernels_run(call.device):
        return (
            f"needs CUDA tensors, got tensors on {call.device}; pass impl='reference', "
            "or set TRITON_INTERPRET=1 to run the kernels on a CPU"
        )
    if call.device == "cpu" and call.dtype == torch.bfloat16:
        return NOT_INTERPRETED
    if max(call.head_k, call.head_v) > 256:
        return f"takes head sizes up to 256, got K={call.head_k} and V={call.head_v}; {_REFERENCE}"
    if call.dtype == torch.float64:
        return "takes bfloat16, float16 and float32, got float64; pass impl='reference'"
    return None


def _sdpa_limit(call: Call) -> str | None:
    if call.device == "cuda":
        # among torch's kernels only cuDNN supports K ≠ V; torch.compile cannot trace the check whether cuDNN is
        # available
        asks = call.head_k != call.head_v and call.dtype in _HALF and not torch.compiler.is_compiling()
        if asks and takes_cudnn(call.tq, call.tk, call.head_k, call.head_v, call.mask, call.packed):
            return None
        return _flash_limit(call)
    if call.mask.causal and call.tq > call.tk:
        return f"needs at least as many keys as queries for causal=True, got {call.tk} and {call.tq}; {_REFERENCE}"
    if call.head_k != call.head_v:
        return f"needs K = V, got K={call.head_k} and V={call.head_v}; {_REFERENCE}"
    return None


def _flash_attn_limit(call: Call) -> str | None:
    if call.device != "cuda":
        return f"needs CUDA tensors, got tensors on {call.device}; pass impl='sdpa' or impl='reference'"
    version = flash_attention()
    if not version:
        return (
            "needs the package flash-attn-4 on a GPU of compute capability 9 to 11, or flash-attn (2), neither of "
            "which is here; pass impl='triton' or impl='sdpa'"
        )
    if version == 4 and 128 < call.head_k < 256 and not on_hopper():
        return f"takes heads up to 128, or of 256, on this device, got K={call.head_k}; pass impl='triton'"
    return _flash_limit(call)


def _flash_limit(call: Call) -> str | None:
    """Return why FlashAttention, in torch or its own packages, does not support the call; None if it does."""
    if call.dtype not in _HALF:
        return f"takes bfloat16 and float16, got {str(call.dtype).removeprefix('torch.')}; pass impl='triton'"
    if call.head_k != call.head_v or call.head_k % 8 or call.head_k > 256:
        return f"needs K = V, a multiple of 8 up to 256, got K={call.head_k} and V={call.head_v}; pass impl='triton'"
    if call.mask.window is not None and call.mask.sinks:
        return f"has no sinks beside a window, got sinks={call.mask.sinks}; pass impl='triton'"
    if call.mask.causal and call.tq > call.tk:
        return (
            f"needs at least as many keys as queries for causal=True, got {call.tk} and {call.tq}; pass impl='triton'"
        )
    return None


def _gluon_limit(call: Call) -> str | None:
    """Return why Gluon kernels do not support a CUDA call, or None; `GLUON.require` checks sizes and layouts."""
    return _triton_limit(call) if call.device == "cuda" else None


_LIMITS: dict[str, Callable[[Call], str | None]] = {
    "gluon": _gluon_limit,
    "triton": _triton_limit,
    "sdpa": _sdpa_limit,
    "flash_attn": _flash_attn_limit,
    "reference": lambda call: None,
}
