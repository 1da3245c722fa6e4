"""Decoding steps on pools of states: row n of a call reads and overwrites slot `slots[n]` of each pool.

A pool `[S, ...]` has a slot for each sequence. The elements of a slot are contiguous; the slots may be any distance
apart. A row whose slot is negative is padding: its output is zero, and it reads and writes no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenmix_core.ops.checks import check_dtype
from tokenmix_core.ops.dispatch import HALF


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
        ValueError: a tensor is not contiguous, slots are not int32, or a slot does not exist.
    """
    for name, x in written.items():
        if not (x if slots is None else x[:1]).is_contiguous():
            which = "" if slots is None else " within a slot"
            raise ValueError(f"{op}: {name} must be contiguous{which} to be overwritten, got strides {x.stride()}")
    if slots is None:
        return
    check_dtype(op, (torch.int32,), slots=slots)
    if not slots.is_cuda and not torch.compiler.is_compiling() and len(slots):
        number = min(map(len, written.values()))
        if int(slots.max()) >= number:
            raise ValueError(f"{op}: slots must be less than the pool's {number} slots, got {slots.tolist()[:16]}")


def check_spacing(op: str, slots: Tensor | None, state: Tensor, impl: str | None) -> None:
    """Raise a ValueError unless the slots of a pool of recurrent states are a multiple of 16 elements apart.

    With other distances Triton would load a state element by element, and 16-bit elements are too small for cp.async.
    """
    if slots is not None and impl != "reference" and state.stride(0) % 16:
        raise ValueError(f"{op}: slots of state must be a multiple of 16 elements apart, got {state.stride(0)}")


def slot_stride(slots: Tensor | None, pool: Tensor) -> int | None:
    """Return the elements from one slot to the next; None without slots: the kernel then has no such parameter."""
    return None if slots is None else pool.stride(0)


def at_slots(
    step: Callable[..., Tensor], slots: Tensor | None, rows: Sequence[Tensor | None], pools: Sequence[Tensor]
) -> Tensor:
    """Return the outputs of the reference `step(*rows, *states)`, which overwrites its states, on slots of pools.

    The step gets neither padded rows nor slots that no row names. Without slots, it gets the tensors as they are.
    """
    if slots is None:
        return step(*rows, *pools)
    (live,) = torch.where(slots >= 0)
    index = slots[live].long()
    held = [pool[index] for pool in pools]
    o = step(*(None if x is None else x[live] for x in rows), *held)
    for pool, x in zip(pools, held, strict=True):
        pool.index_copy_(0, index, x)
    return o.new_zeros(len(slots), *o.shape[1:]).index_copy_(0, live, o)
