"""The scheduler of continuous batching: which tokens of which requests the next step computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import Scheduler

from tokenmix_core.modeling.request_states import Chunk, RequestStates

# name of the request option that has extra inputs for the mixers
INPUTS = "mixer_inputs"
# share of free pages below which no request begins beside running ones, unless the configuration sets another
_SAFETY_MARGIN = 0.15
# a prompt that exceeds the rest of a step's budget waits for a later step, and at most so many shorter prompts overtake
_LOOK_AHEAD = 16


class Scheduled(NamedTuple):
    """A request's part in a step.

    Attributes:
        state: transformers' object for the request.
        chunk: the request's tokens in the step.
        tokens: these tokens, if they belong to the prompt; None for the token that the request generated last.
    """

    state: RequestState
    chunk: Chunk
    tokens: list[int] | None

    @property
    def samples(self) -> bool:
        """True if the step's logits of this request give a new token."""
        return self.tokens is None or not self.state.remaining_prefill_tokens


class TokenPool:
    """Counts the pages of tokens that requests hold; `RequestStates` holds their states.

    Attributes:
        pages, size: number of all pages, and tokens in a page.
        free: number of pages that no request holds.
    """

    def __init__(self, pages: int, size: int, states: RequestStates):
        self.pages, self.size, self.free = pages, size, pages
        self._states = states
        self._held: dict[str, int] = {}

    def reserve(self, request: str, tokens: int) -> bool:
        """Give a request the pages for `tokens` tokens; return False, and change nothing, if too few are free."""
        held = self._held.get(request, 0)
        more = -(-tokens // self.size) - held
        if more > self.free:
            return False
        if more > 0:
            self._held[request] = held + more
            self.free -= more
        return True

    def free_blocks(self, request: str) -> None:
        """Free a request's pages and its state; does nothing for an unknown request."""
        self.free += self._held.pop(request, 0)
        self._states.drop(request)


class RequestScheduler(Scheduler):
    """Schedules one token of each decoding request, then prompts in the order of arrival, in one budget of tokens.

    A step may be scheduled before the tokens of the previous step are read: the number of a request's tokens includes
    those in flight. A prompt gets memory for all its tokens when it begins. It is split only if it exceeds the budget
    of a step without other prompts, because a step computes first chunks and later chunks in two calls.

    Args:
        pool: the memory that requests share.
        states: their states.
        safety_margin: share of free pages below which no request begins beside running ones; None for the default.
        max_requests: maximum number of running requests.
        on_prefix: called with a request's id and the number of its first tokens that a snapshot contains.
    """

    cache: TokenPool  # type: ignore[assignment]

    def __init__(
        self,
        pool: TokenPool,
        states: RequestStates,
        safety_margin: float | None,
        max_requests: int,
        on_prefix: Callable[[str, int], object],
    ):
        margin = _SAFETY_MARGIN if safety_margin is None else safety_margin
        super().__init__(pool, margin, max_requests)  # type: ignore[arg-type]
        self.states, self.on_prefix = states, on_prefix

    def schedule_batch(self, token_budget: int, cache_budget: int = 0) -> list[Scheduled] | None:  # type: ignore[override]
        """Return the next step's parts, decoding requests first; None if a decoding request has no memory left."""
        batch: list[Scheduled] = []
        for name, state in self.active_requests.items():
            past, given = state.position_offset, len(state.initial_tokens)
            if state.remaining_prefill_tokens:
                continue
            if past - given + 1 >= state._new_tokens_limit:
                # the last token is in flight, so that the state is not needed any more
                self.cache.free_blocks(name)
                continue
            if not self.cache.reserve(name, past + 1):
                return None
            chunk = Chunk(name, past, 1, _inputs(state), False, given + (state.max_new_tokens or 0))
            batch.append(Scheduled(state, chunk, None))
            if len(batch) == token_budget:
                break
        for state, _, _ in batch:
            state.position_offset += 1
        return batch + self._prompts(token_budget - len(batch), bool(batch))

    def fork_requests(self) -> None:
        """Copy the requests whose prompt is computed except for its last token, for their further answers."""
        forks, self._requests_to_fork = self._requests_to_fork, []
        for state in forks:
            name, count = state.request_id, state.num_children
            if self.active_requests.get(name) is not state:
                continue
            state.num_children = 0
            for copy in (f"{name}__child#{i}" for i in range(count)):
                if len(self.active_requests) < self.max_requests_per_batch and self.cache.reserve(
                    copy, len(state.initial_tokens)
                ):
                    self.active_requests[copy] = state.fork(copy)
                    self.states.fork(name, [copy])
                else:
                    other = state.create_equivalent_initial_request()
                    other.request_id = copy
                    self.add_waiting_request(other)

    def preempt(self) -> None:
        """Free the memory of the newest request, which waits until another request ends and is then computed again.

        Raises:
            RuntimeError: it is the only request.
        """
        if len(self.active_requests) < 2:
            raise RuntimeError("the pool is too small for a single request")
        name, state = next(reversed(self.active_requests.items()))
        self.finish_request(name)
        self.waiting_requests[name] = state.create_equivalent_initial_request()
        self.waiting_requests_order.appendleft(name)
        self.block_new_requests = True

    def _prompts(self, budget: int, decoding: bool) -> list[Scheduled]:
        """Return the chunks of prompts in a step, with at most `budget` tokens."""
        whole, skipped, batch = budget, 0, []
        begun = [x for x in self.active_requests.values() if x.remaining_prefill_tokens]
        ready = [] if self.block_new_requests else [self.waiting_requests[x] for x in self._next_waiting(budget)]
        for state in [*begun, *ready]:
            if not budget or skipped > _LOOK_AHEAD:
                break
            if len(state.remaining_prefill_tokens) > budget < whole:
                skipped += 1
                continue
            if state.status == RequestStatus.PENDING and not self._begin(state, alone=not (decoding or batch)):
                break
            left = state.remaining_prefill_tokens
            count = min(len(left), budget)
            if state.num_children and count == len(left):
                count -= 1
                self._requests_to_fork.append(state)
            if count:
                past, state.remaining_prefill_tokens = state.position_offset, left[count:]
                end = len(state.initial_tokens) + (state.max_new_tokens or 0)
                batch.append(
                    Scheduled(state, Chunk(state.request_id, past, count, _inputs(state), True, end), left[:count])
                )
                state.position_offset += count
                budget -= count
            state.status = RequestStatus.PREFILLING if state.remaining_prefill_tokens else RequestStatus.DECODING
        return batch

    def _next_waiting(self, budget: int) -> list[str]:
        """Return the waiting requests that may begin in a step, in the order of arrival."""
        free = self.max_requests_per_batch - len(self.active_requests)
        return list(islice(self.waiting_requests_order, max(0, min(free, budget + _LOOK_AHEAD))))

    def _begin(self, state: RequestState, *, alone: bool) -> bool:
        """Move a waiting request to the active ones, with memory for its prompt; return False if there is too little.

        Args:
            state: the request.
            alone: whether the step has no other request.
        """
        name = state.request_id
        if not alone and self.cache.free < self.safety_margin * self.cache.pages:
            return False
        if not self.cache.reserve(name, len(state.initial_tokens)):
            return False
        found = self.states.begin(name, state.initial_tokens, _inputs(state))
        # a preempted request is not counted again, because it found its prefix earlier
        if found and not state._true_initial_tokens:
            self.on_prefix(name, found)
        state.position_offset, state.remaining_prefill_tokens = found, state.initial_tokens[found:]
        self.active_requests[name] = self.waiting_requests.pop(name)
        self.waiting_requests_order.remove(name)
        return True


def _inputs(state: RequestState) -> dict[str, Any]:
    return state.logit_processor_kwargs.get(INPUTS, {})
