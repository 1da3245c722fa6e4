"""NAtS-L on rows that are split over ranks: each rank computes some heads of whole rows, as chunks may cross ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenmix_core.parallel import HeadExchange, current_shard
from tokenmix_nats_l.chunks import Tokens, chunk_means, type_statistics


def mix_sequences(
    layer: Any, x: Tensor, tokens: Tokens, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return both operations' outputs of a NAtS-L layer for whole sequences, and its statistics and loss.

    If rows are split over ranks, x and the outputs have this rank's tokens, and the loss is this rank's part. Types are
    equal on all ranks: each rank computes the chunks' means for some channels of x, and all ranks exchange these.
    """
    shard = current_shard()
    if shard is None:
        types = layer.types_of(x, cu_seqlens)
        return *layer.mix(tokens, types, cu_seqlens), type_statistics(layer, types, x, cu_seqlens)
    heads = HeadExchange(shard, layer.num_heads, "nats_l")
    channels = HeadExchange(shard, x.shape[-1], "nats_l types")
    cu_seqlens = shard.row_cu_seqlens(x.device)
    (rows,) = channels.to_heads(x)
    means = channels.gather(chunk_means(rows, layer.chunk, cu_seqlens))
    types = layer.types_of(rows, cu_seqlens, means)
    whole = Tokens._make((*heads.to_heads(*tokens[:-1]), tokens.flat_q))
    own = types._replace(softmax=heads.own(types.softmax), linear=heads.own(types.linear))
    linear, softmax = map(heads.to_tokens, layer.mix(whole, own, cu_seqlens))
    found = type_statistics(layer, types, rows, cu_seqlens)
    if "budget_loss" in found:
        # divide by the number of ranks, because losses are summed over ranks
        found["budget_loss"] = found["budget_loss"] / shard.size
    return linear, softmax, found
