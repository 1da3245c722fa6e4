"""Chunk types and both operations as one operator for torch.export: no size in the graph depends on chunks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix_core.ops import exportable
from tokenmix_nats_l.chunks import Tokens, chunk_indices, chunk_means, forced_types, learned_types, type_statistics

_OPTIONS = ("num_heads", "head_dim", "num_softmax_heads", "chunk", "own_chunk", "decay", "impl")


# the class of NAtS-L layers, which its module registers by `exports`: that module imports this one, not vice versa
_classes: list[type] = []


def exports(cls: type) -> type:
    """Class decorator that registers the class of which the operator makes layers."""
    _classes.append(cls)
    return cls


@functools.cache
def _layer(hidden_size: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return a layer without weights, for its methods that mix tokens."""
    with torch.device("meta"):
        return _classes[0](hidden_size, **dict(options))


def _mix(
    x, q, k, v, softmax_q, softmax_k, softmax_v, g, beta, types, options, weight=None, center=None, threshold=None
):
    layer, means = _layer(x.shape[-1], tuple(options.items())), chunk_means(x, options["chunk"])
    if types == "learned":
        assert weight is not None
        scores = F.linear(means if center is None else means - center, weight.to(means.dtype))
        found = learned_types(scores, None if threshold is None else SimpleNamespace(threshold=threshold))  # type: ignore[arg-type]
    else:
        indices = chunk_indices(x.shape[0], x.shape[1], options["chunk"], None, x.device)
        found = forced_types(types, indices, options["num_heads"], means.dtype)
    with torch.no_grad():
        linear, softmax = layer.mix(Tokens(q, k, v, softmax_q, softmax_k, softmax_v, g, beta, q), found, None)
    about = type_statistics(layer, found, x, None)
    return linear, softmax, about["softmax_share"], about["chunks"]


def _shapes(x, softmax_v, options, **_):
    wide = torch.promote_types(x.dtype, torch.float32)
    share, chunks = x.new_empty(options["num_heads"], dtype=wide), x.new_empty((), dtype=wide)
    return torch.empty_like(softmax_v), torch.empty_like(softmax_v), share, chunks


_mixed = exportable(_mix, _shapes)


def mix_exported(layer: Any, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return both operations' outputs, and statistics of the chunks' types by name, for whole sequences of any length.

    Raises:
        ValueError: `score_proj`, which computes the scores, has an adapter.
    """
    scores: dict[str, Any] = {}
    if layer.types == "learned":
        # check the class only: torch.export adds hooks of its own to modules
        if type(layer.score_proj) is not nn.Linear:
            raise ValueError("NatsL: torch.export needs a score_proj without adapters: merge them into it first")
        scores["weight"] = layer.score_proj.weight
        if layer.threshold is not None:
            scores |= {"center": layer.threshold.center, "threshold": layer.threshold.threshold}
    named = {name: value for name, value in tokens._asdict().items() if name != "flat_q"}
    options = {name: getattr(layer, name) for name in _OPTIONS} | {"expand_v": layer.value_dim / layer.head_dim}
    linear, softmax, share, chunks = _mixed(x=x, **named, types=layer.types, options=options, **scores)
    return linear, softmax, {"softmax_share": share, "chunks": chunks}
