"""Tests that calls on slots of a pool equal calls on states, and touch no other memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tokenmix_core.testing.closeness import assert_within

# the 16-bit dtype in which kernels are tested; the interpreter does not support bfloat16
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# slots of the tests' four rows, of which the first and the third are padding
SLOTS = (-1, 3, -1, 1)


def poisoned_pool(state: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pool of five slots with the two states in slots 3 and 1, and its memory `[5, 2 · size of a state]`.

    All other memory is NaN.
    """
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
            ([1, 1], r"slots must differ unless they are negative, got \[1, 1\]"),
            (torch.tensor([0.0, 1.0]), "slots must be int32, int64, got float32"),
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


# the slots of the five sequences of `PrefillTests`, of a pool of eight. Two sequences start from a zero state: the
# first, which has no slot, and the second, which is fresh
PREFILL_SLOTS, FRESH = (-1, 6, 3, 0, 5), (False, True, False, False, False)


def prefill_in_slots(
    prefill: Callable, given: dict[str, Any], state: torch.Tensor, index: torch.dtype, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill five sequences in `PREFILL_SLOTS`; return outputs, and the final states of the last four sequences.

    The pool's memory is NaN, except for slots 3, 0 and 5, which the call may read and which hold the last three states.
    Asserts that the call writes only to these slots and slot 6. `index` is the dtype of the slots.
    """
    size, device = state[0].numel(), state.device
    memory = torch.full((8, 2 * size), torch.nan, dtype=state.dtype, device=device)
    pool = memory[:, :size].view(8, *state.shape[1:])
    pool[[3, 0, 5]] = state[2:]
    slots, fresh = torch.tensor(PREFILL_SLOTS, dtype=index, device=device), torch.tensor(FRESH, device=device)
    o = prefill(**given, state=pool, slots=slots, fresh=fresh, impl=impl)
    assert memory[[1, 2, 4, 7]].isnan().all()
    assert memory[:, size:].isnan().all()
    return o, pool[[6, 3, 0, 5]]


class PrefillTests:
    """Tests of a prefill: the form of an operation for whole sequences that start from and end in slots of a pool.

    A contract of the operation inherits them, before `OpContract`.

    Attributes:
        prefill: the function, and the sizes of a packed call of five sequences with initial states.
        prefill_patches: functions that take `tuning.override` and select other tiles, by name.
        prefill_pools: dtypes of the pool.
    """

    prefill: ClassVar[Any] = None
    prefill_patches: ClassVar[dict[str, Callable]] = {}
    prefill_pools: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, HALF)

    def _prefill_call(self, dtype: torch.dtype, device: str) -> tuple[dict[str, Any], torch.Tensor]:
        here: Any = self
        tensors, options = here.make(torch.float32, device, **here.prefill[1])
        given = {name: x.detach() for name, x in tensors.items()} | options
        return given, given.pop(here.state[0]).to(dtype)

    @pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
    def test_a_prefill_in_slots_equals_a_call_on_states(self, impl, index, prefill_patch, device, override):
        here: Any = self
        if prefill_patch is not None:
            here.prefill_patches[prefill_patch](override)
        whole = next(iter(here.forms.values()))
        for dtype in here.prefill_pools:
            given, state = here._prefill_call(dtype, device)
            exact = {
                name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for name, x in given.items()
            }
            before = state.double()
            before[:2] = 0
            wanted = whole(**exact, **{here.state[0]: before}, impl="reference")
            results = [prefill_in_slots(here.prefill[0], given, state, index, x) for x in (impl, "reference")]
            least = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5)
            for name, true, got, eager in zip(("o", "state"), wanted, *results, strict=True):
                true = true if name == "o" else true[1:]
                assert_within(name, got, true, eager, floor=least if name == "state" else 2e-6)

    def test_a_prefill_without_fresh_reads_every_slot(self, impl, device):
        here: Any = self
        given, state = self._prefill_call(torch.float32, device)
        slots = torch.tensor([4, 1, 2, 3, 0], device=device)
        pool = torch.empty_like(state).index_copy_(0, slots, state)
        o = here.prefill[0](**given, state=pool, slots=slots, impl=impl)
        wanted = next(iter(here.forms.values()))(**given, **{here.state[0]: state}, impl="reference")
        torch.testing.assert_close(o, wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool[slots], wanted[1], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"slots": [0, 1, 2, 3]}, r"slots must have shape \[N\] with N=5, got \[4\]"),
            ({"slots": [0, 1, 2, 3, 8]}, "slots must be less than the pool's 8 slots"),
            ({"slots": [0, 1, 2, 3, 3]}, "slots must differ unless they are negative"),
            ({"slots": [0.0, 1.0, 2.0, 3.0, 4.0]}, "slots must be int32, int64, got float32"),
            ({"slots": None}, r"slots must be a tensor of shape \[N\], got None"),
            ({"fresh": torch.zeros(4, dtype=torch.bool)}, r"fresh must have shape \[N\] with N=5, got \[4\]"),
            ({"fresh": torch.zeros(5)}, "fresh must be bool, got float32"),
            ({"state": torch.zeros(8, 2)}, r"state must have shape \["),
            ({"state": None}, "state must be a tensor of shape"),
        ],
    )
    def test_malformed_prefills_are_refused(self, change, words):
        here: Any = self
        given, state = self._prefill_call(torch.float32, "cpu")
        change = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in change.items()}
        call = given | {"state": state.new_zeros(8, *state.shape[1:]), "slots": torch.arange(5)} | change
        with pytest.raises(ValueError, match=words):
            here.prefill[0](**call)
        wide = state.new_zeros(8, *state.shape[1:-1], 2 * state.shape[-1])[..., : state.shape[-1]]
        with pytest.raises(ValueError, match="must be contiguous within a slot"):
            here.prefill[0](**given, state=wide, slots=torch.arange(5))

    def test_a_prefill_refuses_tensors_that_require_gradients(self):
        here: Any = self
        given, state = self._prefill_call(torch.float32, "cpu")
        name = here.tokens[0]
        call = given | {"state": state, "slots": torch.arange(5), name: given[name].requires_grad_()}
        with pytest.raises(ValueError, match=f"{name} requires a gradient"):
            here.prefill[0](**call)
        with torch.no_grad():
            assert not here.prefill[0](**call).requires_grad
