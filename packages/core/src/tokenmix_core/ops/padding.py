"""Padding of packed batches: tokens after the last boundary, whose outputs and gradients are zero.

Padding keeps the shape of a packed batch constant while its sequences change, as CUDA graphs require. Values in the
padding of inputs, NaN included, have no influence. Kernels leave the padding of their results uninitialised;
`zero_padding` then zeroes it in one launch, which reads the last boundary on the device. References in eager PyTorch
read the boundaries on the CPU; `drops_padding` cuts the padding off their arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def zero_padding(cu_seqlens: Tensor | None, *tensors: Tensor | None, before: int = 0) -> None:
    """Zero the padding of tensors `[1, T, ...]` with equal T; do nothing if `cu_seqlens` is None (an unpacked batch).

    Each tensor is contiguous or has tokens as its innermost dimension in memory. `before` is the number of extra rows,
    such as earlier inputs, that these tensors hold before each sequence's tokens; `cu_seqlens` does not count them.
    """
    if cu_seqlens is None:
        return
    given = [x for x in tensors if x is not None and x.numel()]
    if given:
        from tokenmix_core.ops.padding_kernel import MOST, launch

        for i in range(0, len(given), MOST):
            launch(cu_seqlens, given[i : i + MOST], before * (len(cu_seqlens) - 1))


def drops_padding(*tokens: str, results: int = 1) -> Callable:
    """Decorate a function in eager PyTorch: cut the padding off its arguments, and pad its results with zeros.

    If the boundaries are on a GPU, the arguments' padding is replaced by zeros instead, because cutting it off would
    make the CPU wait for the GPU. The same happens under torch.compile, which does not know the boundaries' values.

    Args:
        tokens: names of arguments with tokens along their second axis.
        results: how many results, counted from the first, have one entry per token.
    """

    def decorate(form: Callable) -> Callable:
        names = list(inspect.signature(form).parameters)

        @functools.wraps(form)
        def call(*args: Any, **given: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | given
            cu_seqlens = given.get("cu_seqlens")
            if cu_seqlens is None:
                return form(**given)
            T, of_tokens = given[tokens[0]].shape[1], {name: given[name] for name in tokens if name in given}
            if cu_seqlens.is_cuda or torch.compiler.is_compiling():
                of_tokens = {name: without_padding(x, cu_seqlens) for name, x in of_tokens.items()}
            elif (last := int(cu_seqlens[-1])) == T:
                return form(**given)
            else:
                of_tokens = {name: x if x is None else x[:, :last] for name, x in of_tokens.items()}
            found = form(**given | of_tokens)
            if isinstance(found, Tensor):
                return without_padding(_padded(found, T), cu_seqlens)
            padded = [without_padding(_padded(x, T), cu_seqlens) if i < results else x for i, x in enumerate(found)]
            return type(found)(*padded) if hasattr(found, "_fields") else tuple(padded)

        return call

    return decorate


def without_padding(x: Any, cu_seqlens: Tensor | None) -> Any:
    """Return x `[1, T, ...]` with its padding set to zero; return x itself if x or `cu_seqlens` is None."""
    if x is None or cu_seqlens is None:
        return x
    padding = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
    # unlike multiplication by a mask, `masked_fill` also removes NaN, both from values and from gradients
    return x.masked_fill(padding.view(1, -1, *[1] * (x.dim() - 2)), 0)


def _padded(x: Tensor, tokens: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, tokens - x.shape[1]))
