"""Append tokens to the rows of training calls, so that lengths are multiples of 16 or more and few shapes occur.

At the first calls of each shape, launches are planned (`launch.cache`) and cuBLAS selects kernels. If every step has a
new length, this takes longer than the step of a small model on a GPU. In a causal model, appended tokens without labels
do not change the loss. A row gets at most a sixteenth more tokens (below 256 tokens, at most 15), on average 2 to 3 %.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch import compat, flags
from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.kernels.launch.cache.replay import on_gpu
from tokenmix_core.nn.loss import IGNORE
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.plain import has_hooks, modules_of

# lengths are multiples of this or of a larger power of two
_LEAST = 16
_LIBRARIES = ("torch.", "tokenmix_", "peft.", "bitsandbytes.", "torchao.")


def rounded_length(tokens: int) -> int:
    """Round `tokens` up to a multiple of a power of two, which is 1/32 to 1/16 of `tokens` but at least 16."""
    step = max(_LEAST, 1 << max(0, tokens.bit_length() - 5))
    return cdiv(tokens, step) * step


def round_up(
    model: nn.Module, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Append tokens without labels to each row of a training call; return ids, labels and boundaries.

    Each row gets copies of its own first tokens. In packed rows the appended tokens are padding, and empty documents
    are appended until the number of documents is a power of two. A single row gets boundaries if a mixer needs them
    (`Mixer.bounds_more_tokens`). The arguments are returned unchanged if `can_round` does not hold, if a row would more
    than double, or if several rows would need boundaries.
    """
    if torch.compiler.is_compiling():
        # change nothing, because under torch.compile one graph serves all lengths
        return input_ids, labels, cu_seqlens
    if input_ids.dim() != 2 or labels.shape != input_ids.shape or (cu_seqlens is not None and cu_seqlens.dim() != 1):
        # return invalid arguments unchanged: the model itself raises the error
        return input_ids, labels, cu_seqlens
    tokens = input_ids.shape[1]
    more = rounded_length(tokens) - tokens
    documents = 0
    if cu_seqlens is not None:
        given = len(cu_seqlens) - 1
        wanted = given + bool(more)
        documents = (1 << max(0, wanted - 1).bit_length()) - given
    if (not more and not documents) or more > tokens:
        return input_ids, labels, cu_seqlens
    modules = modules_of(model)
    if not can_round(modules, input_ids):
        return input_ids, labels, cu_seqlens
    if cu_seqlens is None and any(isinstance(x, Mixer) and x.bounds_more_tokens for x in modules):
        if len(input_ids) > 1:
            return input_ids, labels, cu_seqlens
        # [0, T], made on the device: a copy from the host would wait for the device
        cu_seqlens = torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=input_ids.device)
    if more:
        input_ids = torch.cat((input_ids, input_ids[:, :more]), 1)
        labels = nn.functional.pad(labels, (0, more), value=IGNORE)
    if cu_seqlens is not None and documents:
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(documents)))
    return input_ids, labels, cu_seqlens


def can_round(modules: Iterable[nn.Module], input_ids: Tensor) -> bool:
    """True if appended tokens have no visible effect and save time.

    This requires eager mode, a GPU, the launch cache, modules of known libraries without hooks, and mixers that allow
    appended tokens.
    """
    if not (flags.on and is_plain(input_ids) and on_gpu(input_ids)) or compat.watches_all_modules():
        return False
    return all(_is_known(type(x)) and not has_hooks(x) and takes_more_tokens(x) for x in modules)


def takes_more_tokens(module: nn.Module) -> bool:
    """False for a mixer, unless its own class sets `takes_more_tokens` to True; True for other modules."""
    if not isinstance(module, Mixer):
        return True
    return "takes_more_tokens" in vars(type(module)) and module.takes_more_tokens


@functools.cache
def _is_known(kind: type[nn.Module]) -> bool:
    """True if a class is from a library whose modules, except mixers, compute each token independently."""
    return kind.__module__.startswith(_LIBRARIES)


def is_given(*values: Any) -> bool:
    """True if any of a call's optional inputs is given."""
    return any(x is not None and x is not False for x in values)
