"""Calls on pools of states: sequence n of a call reads and overwrites slot `slots[n]` of each pool.

A pool `[S, ...]` has a slot for each sequence. The elements of a slot are contiguous; the slots may be any distance
apart. A sequence with a negative slot reads and writes no slot. In a decoding step it is padding, and its output is
zero. In a prefill, a call on whole sequences, it starts from a zero state, and its final state is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.ops.checks import bind_shapes, check_dtype
from tokenmix_core.ops.dispatch import HALF
from tokenmix_core.ops.types import ScanOutput


class Pool(NamedTuple):
    """A pool of states, and its slots for the sequences of a prefill.

    Attributes:
        state: the pool, `[S, ...]`.
        slots: int32 or int64 `[N]`, the slot of each sequence.
        fresh: bool `[N]`, True for a sequence that starts from a zero state and does not read its slot; None if none
            does.
    """

    state: Tensor
    slots: Tensor
    fresh: Tensor | None


def slot_arguments(pool: Pool | None) -> dict[str, Any]:
    """Return the arguments of a kernel that describe slots; all are None without a pool."""
    slots, fresh, stride = (None, None, None) if pool is None else (*pool[1:], pool.state.stride(0))
    return {"slots": slots, "fresh": fresh, "stride_state": stride}


def pool_strides(pools: Sequence[Pool] | None) -> list[int] | None:
    """Return for each pool the number of elements from one slot to the next; None without pools."""
    return None if pools is None else [pool.state.stride(0) for pool in pools]


def pool_of(state: Tensor, slots: Tensor, fresh: Tensor | None) -> Pool:
    """Return the pool as kernels need it: slots and fresh contiguous."""
    return Pool(state, slots.contiguous(), None if fresh is None else fresh.contiguous())


def first_axis(slots: Tensor | None) -> str:
    """Return the letter of the first axis of the tensors that a step overwrites: S for pools, else B."""
    return "B" if slots is None else "S"


def state_dtypes(slots: Tensor | None) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a kernel takes for a recurrent state: float32 and, in a pool, 16 bits."""
    return (torch.float32,) if slots is None else (torch.float32, *HALF)


def check_written(op: str, slots: Tensor | None, **written: Tensor) -> None:
    """Check `slots`, and the strides of the tensors that a step overwrites.

    The values of slots are checked only if they are on a CPU: reading them from a GPU would wait for its stream.

    Raises:
        ValueError: a tensor or, with `slots`, a slot of it is not contiguous; slots are not integers; a slot does not
            exist or belongs to two rows.
    """
    for name, x in written.items():
        if not (x if slots is None else x[:1]).is_contiguous():
            which = "" if slots is None else " within a slot"
            raise ValueError(f"{op}: {name} must be contiguous{which} to be overwritten, got strides {x.stride()}")
    check_slots(op, slots, min(map(len, written.values())), written=True)


def check_slots(op: str, slots: Tensor | None, number: int, *, written: bool = False) -> None:
    """Check the dtype of slots and, if they are on a CPU, that the pool of `number` slots has them.

    If the call writes the slots (`written`), they may be int64 and negative (padding), and slots that are not negative
    must differ.

    Raises:
        ValueError: slots of another dtype, a slot that does not exist, or one that two sequences would write.
    """
    if slots is None:
        return
    check_dtype(op, (torch.int32, torch.int64) if written else (torch.int32,), slots=slots)
    # reading slots during tracing is impossible, and on a GPU a synchronisation
    if slots.is_cuda or not is_plain(slots) or torch.compiler.is_compiling() or not len(slots):
        return
    if int(slots.max()) >= number or (int(slots.min()) < 0 and not written):
        least = "" if written else "at least 0 and "
        raise ValueError(f"{op}: slots must be {least}less than the pool's {number} slots, got {slots.tolist()[:16]}")
    live = slots[slots >= 0]
    if written and len(live.unique()) < len(live):
        raise ValueError(f"{op}: slots must differ unless they are negative, got {slots.tolist()[:16]}")


def check_pool(op: str, dims: dict[str, int], like: tuple[Tensor, str], shape: str, **pools: Tensor | None) -> None:
    """Check pools, whose slots have the shape `shape`, and `slots` and `fresh` against the sizes `dims` of a prefill.

    Args:
        dims: sizes by letter, among them N, the number of sequences.
        like: a tensor of the call and its shape: pools must be on its device.
        pools: `slots`, `fresh` (may be None), and the pools by name.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit, or as for `check_written`.
    """
    slots, fresh = pools.pop("slots"), pools.pop("fresh")
    states = {name: (pool, f"S{i} {shape}") for i, (name, pool) in enumerate(pools.items())}
    bind_shapes(op, dims, like=like, slots=(slots, "N"), fresh=(fresh, "N?"), **states)
    check_dtype(op, (torch.bool,), fresh=fresh)
    check_written(op, slots, **{name: pool for name, pool in pools.items() if pool is not None})


def refuse_gradients(op: str, **tensors: Tensor | None) -> None:
    """Raise a ValueError if gradients are enabled and a tensor requires one, because a prefill in slots has none."""
    for name, x in tensors.items() if torch.is_grad_enabled() else ():
        if x is not None and x.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient, but the call has none; use torch.no_grad()")


def check_spacing(op: str, slots: Tensor | None, state: Tensor, impl: str | None) -> None:
    """Raise a ValueError unless the slots of a pool of recurrent states are a multiple of 16 elements apart.

    With other distances Triton would load a state element by element, and 16-bit elements are too small for cp.async.
    The reference takes any distance.
    """
    if slots is not None and impl != "reference" and state.stride(0) % 16:
        raise ValueError(f"{op}: slots of state must be a multiple of 16 elements apart, got {state.stride(0)}")


def slot_stride(slots: Tensor | None, pool: Tensor) -> int | None:
    """Return the number of elements from one slot of the pool to the next; None without slots.

    A kernel for which `slots` and this stride are None is compiled without them.
    """
    return None if slots is None else pool.stride(0)


def at_slots(
    step: Callable[..., Tensor], slots: Tensor | None, rows: Sequence[Tensor | None], pools: Sequence[Tensor]
) -> Tensor:
    """Return the outputs of the reference `step(*rows, *states)`, which overwrites its states, on slots of pools.

    The step gets neither padded rows nor slots that no row names: instead of padding, it gets the first other row
    again, whose state is then stored several times. This needs no synchronisation. Without slots, the step gets the
    tensors as they are.
    """
    if slots is None:
        return step(*rows, *pools)
    live = slots >= 0
    source = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    index = slots[source].clamp(min=0).long()
    held = [pool[index] for pool in pools]
    o = step(*(None if x is None else x[source] for x in rows), *held)
    for pool, x in zip(pools, held, strict=True):
        # if all rows are padding, no slot changes
        pool.index_copy_(0, index, torch.where(live.any(), x, pool[index]))
    return o.masked_fill(~live.view(-1, *[1] * (o.dim() - 1)), 0)


def scan_at_slots(run: Callable[[Tensor], ScanOutput], pool: Pool) -> Tensor:
    """Return the outputs of `run(initial_state)`; store its final states in slots.

    This is for references, and for calls that kernels cannot compute in slots: the states are gathered and scattered.
    """
    state, slots, fresh = pool
    initial = state.new_zeros(len(slots), *state.shape[1:])
    (read,) = torch.where(slots >= 0 if fresh is None else (slots >= 0) & ~fresh)
    o, final_state = run(initial.index_copy_(0, read, state[slots[read].long()]))
    (kept,) = torch.where(slots >= 0)
    state.index_copy_(0, slots[kept].long(), final_state[kept].to(state.dtype))
    return o
