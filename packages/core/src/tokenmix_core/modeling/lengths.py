"""Round the tokens of training calls up, so that lengths that vary give few shapes.

The host decides sizes, tiles, strides and buffers of a call at the first calls of each shape (`launch.replay`), and
cuBLAS chooses its kernels then, too. Where every step has a length of its own, that takes longer than the step of a
small model on a GPU. A causal model computes the same loss if tokens that no label refers to follow its own: at most a
sixteenth more, an average of 2 to 3 %.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch import compat, flags
from tokenmix_core.kernels.launch.cache.replay import is_plain, on_gpu
from tokenmix_core.nn.loss import IGNORE
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.plain import has_hooks

# lengths are multiples of this at least
_LEAST = 16
_LIBRARIES = ("torch.", "tokenmix_", "peft.", "bitsandbytes.", "torchao.")


def rounded_length(tokens: int) -> int:
    """Return the next multiple of a power of two that is between a 32nd and a 16th of the tokens, and 16 at least."""
    step = max(_LEAST, 1 << max(0, tokens.bit_length() - 5))
    return cdiv(tokens, step) * step


def round_up(
    model: nn.Module, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids, labels and boundaries of a training call with tokens behind each row, which no label refers to.

    The tokens are the row's own first ones. In packed rows they are a document; empty documents follow up to a power of
    two. The call stays as it is unless `can_round` holds.
    """
    if torch.compiler.is_compiling():
        # one graph serves all lengths
        return input_ids, labels, cu_seqlens
    if input_ids.dim() != 2 or labels.shape != input_ids.shape or (cu_seqlens is not None and cu_seqlens.dim() != 1):
        # refused where the model looks at its inputs
        return input_ids, labels, cu_seqlens
    tokens = input_ids.shape[1]
    more = rounded_length(tokens) - tokens
    documents = 0
    if cu_seqlens is not None:
        given = len(cu_seqlens) - 1
        wanted = given + bool(more)
        documents = (1 << max(0, wanted - 1).bit_length()) - given
    if (not more and not documents) or more > tokens or not can_round(model, input_ids):
        return input_ids, labels, cu_seqlens
    if more:
        input_ids = torch.cat((input_ids, input_ids[:, :more]), 1)
        labels = nn.functional.pad(labels, (0, more), value=IGNORE)
    if cu_seqlens is not None and documents:
        cu_seqlens = nn.functional.pad(cu_seqlens, (0, documents), value=tokens + more)
    return input_ids, labels, cu_seqlens


def can_round(model: nn.Module, input_ids: Tensor) -> bool:
    """True if nothing but time can tell that tokens follow: on a GPU in eager mode, and nothing watches a module."""
    if not (flags.on and is_plain(input_ids) and on_gpu(input_ids)) or compat.watches_all_modules():
        return False
    return all(_is_known(type(x)) and not has_hooks(x) and takes_more_tokens(x) for x in model.modules())


def takes_more_tokens(module: nn.Module) -> bool:
    """True unless this is a mixer whose own class, not a base class, does not allow further tokens."""
    if not isinstance(module, Mixer):
        return True
    return "takes_more_tokens" in vars(type(module)) and module.takes_more_tokens


@functools.cache
def _is_known(kind: type[nn.Module]) -> bool:
    """True if a module's class is of a library whose modules compute tokens one by one, mixers apart."""
    return kind.__module__.startswith(_LIBRARIES)


def is_given(*values: Any) -> bool:
    """True if an optional input of a call is given."""
    return any(x is not None and x is not False for x in values)
