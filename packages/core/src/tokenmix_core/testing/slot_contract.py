"""Tests that decoding steps on slots of a pool equal steps on states, and touch no other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenmix_core.testing.closeness import assert_within

# the 16-bit dtype in which kernels are tested; the interpreter does not support bfloat16
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# slots of the tests' four rows, of which the first and the third are padding
SLOTS = (-1, 3, -1, 1)


def poisoned_pool(state: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pool of five slots with two states in slots 3 and 1, and its memory; all other memory is NaN."""
    memory = torch.full((5, 2 * state[0].numel()), torch.nan, dtype=dtype, device=state.device)
    pool = memory[:, : state[0].numel()].view(5, *state.shape[1:])
    pool[3], pool[1] = state.to(dtype)
    return pool, memory


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the four rows to which `SLOTS` belong: the two rows of x, and NaN in padding."""
    return x[[0, 0, 0, 1]].index_fill_(0, torch.tensor([0, 2], device=x.device), torch.nan)


def assert_only_slots_written(memory: torch.Tensor, size: int) -> None:
    """Assert that all memory of a `poisoned_pool` is NaN, except the first `size` elements of slots 3 and 1."""
    assert memory[[3, 1], :size].isfinite().all()
    assert memory[[0, 2, 4]].isnan().all()
    assert memory[:, size:].isnan().all()


def step_in_slots(
    step: Callable, rows: dict[str, Any], state: torch.Tensor, dtype: torch.dtype, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a step on the slots `SLOTS` of a `poisoned_pool`; return the outputs and states of its two sequences.

    Asserts that outputs of padding are zero, and that the step writes to no other memory.
    """
    pool, memory = poisoned_pool(state, dtype)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=state.device)
    y = step(**rows, state=pool, slots=slots, impl=impl)
    assert not y[[0, 2]].any()
    assert_only_slots_written(memory, state[0].numel())
    return y[[1, 3]], pool[[3, 1]]


class SlotTests:
    """Part of `OpContract`, which documents the attributes."""

    @pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
    def test_steps_in_slots_equal_steps_on_states(self, impl, dtype, device):
        here: Any = self
        step, sizes = here.step
        tensors, options = here.make(dtype, device, **sizes, T=1)
        token, state = here._token(tensors | options, 0), tensors[here.state[0]].to(dtype)
        exact = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in token.items()}
        exact["state"] = state.double()
        o = step(**exact, impl="reference")
        rows = {name: padded_rows(x) if name in here.tokens else x for name, x in token.items()}
        found = [step_in_slots(step, rows, state, dtype, form) for form in (impl, "reference")]
        for name, true, got, eager in zip(("o", "state"), (o, exact["state"]), *found, strict=True):
            assert_within(name, got, true, eager, floor=torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5))

    @pytest.mark.parametrize(
        ("slots", "words"),
        [
            ([1], r"slots must have shape \[B\] with B=2, got \[1\]"),
            ([1, 5], r"slots must be less than the pool's 5 slots, got \[1, 5\]"),
            (torch.tensor([0, 1]), "slots must be int32, got int64"),
            ([[0, 1]], r"slots must have shape \[B\] with B=2, got \[1, 2\]"),
        ],
    )
    def test_malformed_slots_are_refused(self, slots, words):
        here: Any = self
        step, sizes = here.step
        tensors, options = here.make(torch.float32, **sizes, T=1)
        token, state = here._token(tensors | options, 0), tensors[here.state[0]]
        given = slots if isinstance(slots, torch.Tensor) else torch.tensor(slots, dtype=torch.int32)
        pool = poisoned_pool(state, torch.float32)[0]
        with pytest.raises(ValueError, match=words):
            step(**token, state=pool, slots=given)
        wide = state.new_zeros(5, *state.shape[1:-1], 2 * state.shape[-1])[..., : state.shape[-1]]
        with pytest.raises(ValueError, match="must be contiguous within a slot"):
            step(**token, state=wide, slots=torch.tensor([0, 1], dtype=torch.int32))
