"""Random schedules of requests, compared with plain forward passes; `ModelContract` inherits the test."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenmix_core.modeling.prefixes import Prefixes
from tokenmix_core.modeling.request_states import Chunk, RequestStates
from tokenmix_core.nn.state import StatePart
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere

# environment variable with the number of schedules per configuration
COUNT = "TOKENMIX_SCHEDULES"
_FEW, _STEPS, _BLOCK, _KEPT = 8, 8, 4, 4


class ScheduleContract:
    """Tests that requests served in random orders have the logits of plain forward passes, in float64.

    Attributes:
        schedule_inputs: extra inputs for mixers; the requests take turns in using them.
    """

    schedule_inputs: ClassVar[Sequence[dict[str, Any]]] = ({},)

    @torch.no_grad()
    def test_random_schedules_equal_the_plain_forward(self, model, ids):
        check_schedules(model.double(), ids, self.schedule_inputs, int(os.environ.get(COUNT, _FEW)))


def check_schedules(model: Any, ids: Tensor, inputs: Sequence[dict[str, Any]], count: int) -> None:
    """Serve requests by random schedules, and compare the logits with those of plain forward passes.

    A schedule is a random order of chunks of prompts, decoding steps, crops, forks, snapshots, ends and preemptions.

    Args:
        model: a causal language model in float64.
        ids: at least two rows of tokens.
        inputs: extra inputs for mixers; the requests take turns in using them.
        count: number of schedules.

    Raises:
        AssertionError: logits differ from those of a plain forward pass, or memory remains allocated without requests.
    """
    # some rows begin with the same blocks of tokens, so that requests share snapshots
    shared = [torch.cat((ids[0, :n], ids[1, n:])) for n in (_BLOCK, 2 * _BLOCK + 1)]
    rows = [*ids, *shared]
    given = [model.request_inputs(inputs[i % len(inputs)], ids.shape[1]) for i in range(len(rows))]
    exact = [model(row[None], use_cache=False, **inputs[i % len(inputs)]).logits[0] for i, row in enumerate(rows)]
    for seed in range(count):
        rng = random.Random(seed)
        with graphs_everywhere() if rng.random() < 0.25 else nullcontext():
            _Schedule(model, rows, given, exact, rng, f"schedule {seed}").run()


class _Schedule:
    def __init__(
        self,
        model: Any,
        rows: list[Tensor],
        inputs: list[dict[str, Any]],
        exact: list[Tensor],
        rng: random.Random,
        name: str,
    ):
        self.model, self.rows, self.inputs, self.exact, self.rng, self.name = model, rows, inputs, exact, rng, name
        self.states, self.tokens = RequestStates(model), len(rows[0])
        # for each request: index of its row, number of tokens in its prompt, and number of tokens computed so far
        self.running: dict[str, list[int]] = {}
        self.begun = 0

    def run(self) -> None:
        states, rng = self.states, self.rng
        states.prefixes = Prefixes(_BLOCK, rng.choice((0, 20_000, 1 << 30)))
        for _ in range(_STEPS):
            while len(self.running) < 4 and rng.random() < 0.6:
                self._begin(rng.randrange(len(self.rows)), rng.randint(1, self.tokens))
            self._step()
            for name in list(self.running):
                action = rng.choice(("fork", "cancel", "preempt", "crop", *[""] * 8))
                if action:
                    getattr(self, f"_{action}")(name)
            self._poison()
        held, pool = states.prefixes, states._pool
        states.clear()
        assert pool is None or not pool.slots.owned, self.name
        left = states.allocated_nbytes, len(states._tokens), len(states._settings), len(held._requests)
        assert not any(left), (self.name, left)
        assert held.nbytes == sum(x.allocated_nbytes for x in held._held.values()) <= held.budget, self.name

    def _begin(self, row: int, prompt: int, name: str | None = None) -> None:
        if name is None:
            name, self.begun = str(self.begun), self.begun + 1
        self.states.begin_step()
        found = self.states.begin(name, self.rows[row][:prompt].tolist(), self.inputs[row])
        assert found < prompt, self.name
        self.running[name] = [row, prompt, found]

    def _step(self) -> None:
        chunks, parts = [], []
        for name, (row, prompt, done) in self.running.items():
            if done < self.tokens and self.rng.random() < 0.8:
                size = self.rng.randint(1, prompt - done) if done < prompt else 1
                chunks.append(Chunk(name, done, size, self.inputs[row], done < prompt))
                parts.append(self.rows[row][done : done + size])
                self.running[name][2] += size
        if not chunks:
            return
        for x, logits in zip(chunks, self.states.run(chunks, torch.cat(parts)[None]), strict=True):
            self._compare(logits, x.request, x.past + x.tokens - 1)

    def _compare(self, logits: Tensor, name: str, position: int) -> None:
        exact = self.exact[self.running[name][0]][position]
        assert relative_error(logits, exact) < 1e-6, (self.name, name, position)

    def _fork(self, name: str) -> None:
        copy, self.begun = str(self.begun), self.begun + 1
        self.states.fork(name, [copy])
        self.running[copy] = list(self.running[name])

    def _cancel(self, name: str) -> None:
        self.states.drop(name)
        del self.running[name]

    def _preempt(self, name: str) -> None:
        row, prompt, done = self.running[name]
        self.states.drop(name)
        # after a preemption, the tokens generated before belong to the new prompt
        self._begin(row, max(prompt, done), name)

    def _crop(self, name: str) -> None:
        """Compute several tokens at once, as if they were drafted, remove some of the last ones, and compute more."""
        row, _, done = self.running[name]
        if not done or done + 2 > self.tokens:
            return
        ids, most = self.rows[row], min(self.tokens - 1, done + _KEPT)
        cache = self.model.make_cache(record=_KEPT)
        held, at = self.states._rows[name]
        cache.gather_rows([(held, [at])], [done])
        for again in (False, True):
            end = self.rng.randint(done + 1, most)
            removed = 0 if again else self.rng.randint(0, end - done)
            x = Chunk(name, done, end - done, self.inputs[row])
            logits = self.model(ids[None, done:end], cache=cache, **self.states._inputs([x])).logits[0]
            for position in range(done, end):
                self._compare(logits[position - done], name, position)
            cache.crop(-removed)
            done, most = end - removed, min(self.tokens, end - removed + _KEPT)
        self.states._rows[name], self.states._tokens[name] = (cache, 0), done
        self.running[name][2] = done

    def _poison(self) -> None:
        """Fill with NaN those rows of caches, and those slots, that belong to no request."""
        owned: dict[int, tuple[Any, set[int]]] = {}
        for cache, row in self.states._rows.values():
            owned.setdefault(id(cache), (cache, set()))[1].add(row)
        for cache, rows in owned.values():
            free = [row for row in range(cache.batch_size) if row not in rows]
            for layer in cache.layers if free else ():
                for part in layer.parts.values():
                    if part.slots is None:
                        _fill_with_nan(part, free)
        pool = self.states._pool
        if pool is not None:
            for layer in pool.slots.layers.values():
                for part in layer.parts.values():
                    _fill_with_nan(part, pool.slots.free)


def _fill_with_nan(part: StatePart, rows: list[int]) -> None:
    for x in part.tensors:
        if x.is_floating_point():
            x[rows] = float("nan")
