"""Checks of the arguments of slot-window attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.kernels import is_plain
from tokenmix_core.ops import bind_shapes, check_dtype, check_multiple, check_same_dtype, check_scale
from tokenmix_nha.ops.slot_window.state import SlotWindowState

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SLOTS = (16, 32, 64, 128)
HEAD_SIZES = (64, 128)


def logit_scale(op: str, dims: dict[str, int], scale: float | None) -> float:
    """Return the factor of the logits; None stands for K ** −0.5. Raise a ValueError unless it is positive."""
    if scale is None:
        return dims["K"] ** -0.5
    factor = check_scale(op, scale)
    if factor <= 0:
        raise ValueError(f"{op}: scale must be positive, got {scale!r}")
    return factor


def check_rest(op: str, impl: str | None, dims: dict[str, int], **tensors: Tensor | None) -> None:
    """Raise a ValueError for dtypes, head counts or sizes that the operation or its kernels do not support."""
    floats = (*FLOATS, torch.float64) if impl == "reference" else FLOATS
    check_dtype(op, floats, **tensors)
    check_same_dtype(op, **{name: x for name, x in tensors.items() if name != "f"})
    check_multiple(op, "HQ", dims["HQ"], "H", dims["H"])
    if (tensors["q_slots"] is None) != (tensors["k_slots"] is None):
        given, absent = ("k_slots", "q_slots") if tensors["q_slots"] is None else ("q_slots", "k_slots")
        raise ValueError(f"{op}: q_slots and k_slots go together, got {given} without {absent}")
    if impl != "reference":
        for letter, allowed in (("K", HEAD_SIZES), ("V", HEAD_SIZES), ("M", SLOTS)):
            if dims[letter] not in allowed:
                raise ValueError(
                    f"{op}: impl={impl or 'triton'!r} needs {letter} in {', '.join(map(str, allowed))}, "
                    f"got {letter}={dims[letter]}; choose such a size or pass impl='reference'"
                )


def check_state(
    op: str,
    dims: dict[str, int],
    q: Tensor,
    f: Tensor | None,
    k_slots: Tensor | None,
    state: SlotWindowState,
    rows: str = "N",
) -> None:
    """Raise a ValueError unless `state` fits queries and gates; f is None if the caller has logits, not log-gates.

    `rows` is the letter of its tensors' first axis: S for pools.
    """
    if not isinstance(state, SlotWindowState):
        raise ValueError(f"{op}: the state must be a SlotWindowState, got {type(state).__name__}")
    shapes = {
        "slots_k": "H M K", "slots_v": "H M V", "k": "W H K", "v": "W H V", "f": "W H M", "k_slots": "W H K?",
        "length": "H",
    }  # fmt: skip
    got = state._asdict()
    # pass q first: the check compares the devices of the state's tensors with that of the first tensor
    spec = " ".join(["B", "T", "HQ", "K"] if q.dim() == 4 else ["B", "HQ", "K"])
    bind_shapes(
        op, dict(dims), q=(q, spec), **{f"state.{name}": (got[name], f"{rows} {shapes[name]}") for name in shapes}
    )
    if (k_slots is None) != (state.k_slots is None):
        has = "no k_slots" if state.k_slots is None else "k_slots"
        raise ValueError(f"{op}: the state was made with {has}; pass q_slots and k_slots in all calls or in none")
    wide = torch.promote_types(q.dtype, torch.float32)
    check_dtype(op, (wide,), **{"state.slots_k": state.slots_k, "state.slots_v": state.slots_v})
    check_dtype(op, (torch.int32,), **{"state.length": state.length})
    check_same_dtype(op, q=q, **{f"state.{name}": got[name] for name in ("k", "v", "k_slots")})
    check_dtype(op, (wide if f is None else f.dtype,), **{"state.f": state.f})


def check_alignment(op: str, pool: SlotWindowState) -> None:
    """Raise a ValueError unless all slots of a pool, except lengths, begin at multiples of 16 bytes."""
    for name, x in pool._replace(length=None)._asdict().items():
        if x is not None and (x.stride(0) * x.element_size() % 16 or (is_plain(x) and x.data_ptr() % 16)):
            apart = f"they are {x.stride(0)} elements apart"
            raise ValueError(f"{op}: slots of state.{name} must begin at multiples of 16 bytes; {apart}")
