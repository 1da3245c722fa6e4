"""The public function of one eviction step: it checks arguments and selects the implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.kernels import Checked, is_plain
from tokenmix_core.ops import Impl, bind_shapes, check_dtype, check_same_dtype, of_fields, refuse_writes, resolve_impl
from tokenmix_lte.ops.eviction.reference import evict_step_reference

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WRITTEN = ("keys", "values", "lengths", "scores", "ages", "raws")


@torch.no_grad()
def evict_step(
    k: Float[Tensor, "N H K"],
    v: Float[Tensor, "N H K"],
    raw: Float[Tensor, "N H K"],
    keys: Float[Tensor, "N H S K"],
    values: Float[Tensor, "N H S K"],
    lengths: Int[Tensor, "N H"],
    scores: Float[Tensor, "N H S"],
    ages: Int[Tensor, "N H cap"],
    raws: Float[Tensor, "N P H K"],
    before: Int[Tensor, "N"],
    *,
    window: int,
    sinks: int = 0,
    uniform: bool = False,
    impl: Impl | None = None,
) -> None:
    """Add one token to the memory of each row and head; the token that leaves the window is retained or evicted.

    The memory consists of the arguments `keys` to `raws`, with S = `window` + cap slots per head. It is overwritten,
    without waiting for the device. Not differentiable.

    Args:
        k, v: key (rotated) and value of the new token.
        raw: key of the new token before rotation.
        keys, values: the ring buffer of the window, in which the token at position p has slot p mod `window`, then the
            retained tokens.
        lengths: number of filled slots, int32.
        scores: score of each slot, float32 (the reference also float64); in the ring buffer, those known so far.
        ages: positions of the retained tokens, int32.
        raws: ring buffer of P keys before rotation, in which the token at position p has slot p mod P; P may be 0.
        before: number of tokens in each row before the new one, int32 or int64.
        window: W, number of tokens in the window.
        sinks: number of first tokens, which are retained whatever their scores are.
        uniform: whether to rank tokens by position (Unif.+SWA) instead of by `scores`.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors, the reference for others.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, or tensors of the memory that are not contiguous.
    """
    x = _Inputs(
        k=k, v=v, raw=raw, keys=keys, values=values, lengths=lengths, scores=scores, ages=ages, raws=raws,
        before=before, window=window, sinks=sinks, uniform=uniform,
    )  # fmt: skip
    if _check(*x, impl) == "reference":
        evict_step_reference(**x._asdict())
    else:
        _step(x._replace(k=k.contiguous(), v=v.contiguous(), raw=raw.contiguous(), before=before.contiguous()))


class _Inputs(NamedTuple):
    """The inputs of `evict_step`."""

    k: Tensor
    v: Tensor
    raw: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    scores: Tensor
    ages: Tensor
    raws: Tensor
    before: Tensor
    window: int
    sinks: int
    uniform: bool


@Checked
def _check(k, v, raw, keys, values, lengths, scores, ages, raws, before, window, sinks, uniform, impl) -> str | None:
    """Validate a call and return the implementation, as `resolve_impl` does."""
    op = "evict_step"
    dims = bind_shapes(
        op, {}, k=(k, "N H K"), v=(v, "N H K"), raw=(raw, "N H K"), keys=(keys, "N H S K"), values=(values, "N H S K"),
        lengths=(lengths, "N H"), scores=(scores, "N H S"), ages=(ages, "N H cap"), raws=(raws, "N P H K"),
        before=(before, "N"),
    )  # fmt: skip
    impl = resolve_impl(op, impl, k)
    if window < 1 or dims["cap"] < 1 or window + dims["cap"] != dims["S"] or not 0 <= sinks <= dims["cap"]:
        raise ValueError(
            f"{op}: expected window and cap of at least 1 with S = window + cap slots, and sinks from 0 to cap, got "
            f"window={window}, cap={dims['cap']}, S={dims['S']} and sinks={sinks}"
        )
    eager = impl == "reference"
    check_dtype(op, (*FLOATS, torch.float64) if eager else FLOATS, k=k)
    check_same_dtype(op, k=k, v=v, raw=raw, keys=keys, values=values, raws=raws)
    check_dtype(op, (torch.float32, torch.float64) if eager else (torch.float32,), scores=scores)
    check_dtype(op, (torch.int32,), lengths=lengths, ages=ages)
    check_dtype(op, (torch.int32, torch.int64), before=before)
    for name, x in zip(_WRITTEN, (keys, values, lengths, scores, ages, raws), strict=True):
        if not x.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous, got strides {x.stride()}")
    return impl


def _step(x: _Inputs) -> None:
    """Run the eviction step's kernel: directly in eager mode, as a custom op if torch is tracing."""
    refuse_writes("evict_step")
    if is_plain(x.k):
        _run(*x)
    else:
        _evict_step_op(*x)


@of_fields
def _run(x: _Inputs) -> None:
    from tokenmix_lte.ops.eviction.kernel import run

    run(**x._asdict())


_evict_step_op = torch.library.custom_op("tokenmix_lte::evict_step", _run, mutates_args=_WRITTEN)


@_evict_step_op.register_fake
def _(*_):
    return None
