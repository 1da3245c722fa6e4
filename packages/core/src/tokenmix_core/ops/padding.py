"""Padding of packed batches: tokens after the last boundary, whose outputs and gradients are zero.

The shape of a packed batch can then stay the same while its sequences change, as CUDA graphs require. What the padding
holds has no influence, also if it is NaN. Kernels leave its rows of their results uninitialised, so `zero_padding`
follows them: one launch, which reads the last boundary on the device. Eager forms read the boundaries on the CPU, so
`drops_padding` shortens their arguments.
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
    """Zero the rows of the padding in tensors `[1, T, ...]` of one T; do nothing if the batch is not packed.

    Tensors are contiguous, except that tokens may be the innermost dimension. Each sequence has `before` rows more than
    `cu_seqlens` counts.
    """
    if cu_seqlens is None:
        return
    given = [x for x in tensors if x is not None and x.numel()]
    if given:
        from tokenmix_core.ops.padding_kernel import MOST, launch

        for i in range(0, len(given), MOST):
            launch(cu_seqlens, given[i : i + MOST], before * (len(cu_seqlens) - 1))


def drops_padding(*tokens: str, results: int = 1) -> Callable:
    """Decorate an eager form: compute a packed batch without its padding, then pad the results with zeros.

    With boundaries on a GPU, zeros replace the padding instead, so that the form synchronises no more than before.

    Args:
        tokens: names of arguments with tokens along their second axis.
        results: how many of the first results have one entry per token.
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
    """Return x `[1, T, ...]` with zeros for the padding, on any device; None stays None."""
    if x is None or cu_seqlens is None:
        return x
    padding = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
    # unlike a multiplication by a mask, this also removes NaN, from gradients, too
    return x.masked_fill(padding.view(1, -1, *[1] * (x.dim() - 2)), 0)


def _padded(x: Tensor, tokens: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, tokens - x.shape[1]))
