"""The state after a span of tokens, and the gradient of the state before it, without outputs; not differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.ops.autograd import retried
from tokenmix_core.ops.dispatch import resolve_impl
from tokenmix_core.ops.ssd.api import HEAD_SIZES
from tokenmix_core.ops.ssd.plan import GLUON, plan
from tokenmix_core.ops.ssd.reference import LOWEST_DECAY
from tokenmix_core.ops.ssd.types import Inputs, token_rows

# number of tokens that the reference converts to a wider dtype at a time
_BLOCK = 8192


def span_decay(g: Tensor) -> Tensor:
    """Return the log decay over all T tokens, `[B, HV]`, in float32 or wider, given g `[B, T, HV]`."""
    return g.to(torch.promote_types(g.dtype, torch.float32)).clamp(min=LOWEST_DECAY).sum(1)


@torch.no_grad()
def final_state(k: Tensor, v: Tensor, g: Tensor, dt: Tensor | None = None, impl: str | None = None) -> Tensor:
    """Return the state `[B, HV, K, V]` after the last token; the state before the first token is zero.

    Args:
        k, v, g, dt, impl: as for `chunk_ssd`.
    """
    return _state(k, v, g, dt, 1.0, impl, reverse=False)


@torch.no_grad()
def initial_gradient(q: Tensor, do: Tensor, g: Tensor, scale: float = 1.0, impl: str | None = None) -> Tensor:
    """Return the gradient `[B, HV, K, V]` of the state before the first token, given the gradient of the outputs.

    Args:
        q, g, scale, impl: as for `chunk_ssd`.
        do: the gradient of the outputs.
    """
    return _state(q, do.to(q.dtype), g, None, scale, impl, reverse=True)


def _state(
    x: Tensor, y: Tensor, g: Tensor, dt: Tensor | None, scale: float, impl: str | None, *, reverse: bool
) -> Tensor:
    """Return the final state (x is k, y is v) or, if `reverse`, the initial state's gradient (x is q, y is do).

    Kernels compute it if they support the sizes, else torch operations.
    """
    if (
        resolve_impl("chunk_ssd", impl, x, GLUON) != "reference"
        and x.shape[3] in HEAD_SIZES
        and y.shape[3] in HEAD_SIZES
    ):
        return _by_kernels(x, y, g, dt, scale, impl, reverse)
    wide = torch.promote_types(torch.promote_types(x.dtype, g.dtype), torch.float32)
    b = g.to(wide).clamp(min=LOWEST_DECAY).cumsum(1)
    weights = scale * b.exp() if reverse else (b[:, -1:] - b).exp()
    if dt is not None:
        weights = weights * dt
    found = weights.new_zeros(())
    # convert block by block: copies of a whole long span in a wider dtype would take gigabytes
    for b_x, b_y, b_w in zip(*(t.split(_BLOCK, 1) for t in (x, y, weights)), strict=True):
        values = (b_y * b_w.unsqueeze(-1)).unflatten(2, (x.shape[2], -1))
        found = found + torch.einsum("btgk,btghv->bghkv", b_x.to(wide), values.to(wide))
    return found.flatten(1, 2)


@retried
def _by_kernels(
    x: Tensor, y: Tensor, g: Tensor, dt: Tensor | None, scale: float, impl: str | None, reverse: bool
) -> Tensor:
    from tokenmix_core.ops.ssd.states import segment_states

    x, y = token_rows(x), token_rows(y)
    given = Inputs(
        q=x, k=x, v=y, g=g, initial_state=None, dt=dt, D=None, cu_seqlens=None, scale=scale, impl=impl
    ).aligned()
    by = plan(x, y, None, impl)
    segment = by.segment or next_power_of_2(x.shape[1])
    return segment_states(given, segment=segment, config=by.states, do=y if reverse else None)[1]
