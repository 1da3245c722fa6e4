"""An engine that runs transformers' continuous batching in a thread, with sampling settings for each request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

from tokenmix_core.serving.sampling import Sampling, draw


class _Discard:
    """A queue that discards all elements put into it."""

    def put(self, output: object) -> None:
        """Discard the output."""


class Engine:
    """Runs requests of a causal language model in batches that change with every step; use it as a context manager.

    Args:
        model: the model.
        pool: sizes of the scheduler's token pool and of a step's batch; by default the largest that fit into free
            memory.
        max_tokens: maximum number of tokens of one request; by default the capacity of the pool.
        prefix_bytes: maximum bytes of snapshots, which hold the states after the first tokens of prompts, so that later
            prompts can continue from them; 0 for no snapshots (`HybridBatchingManager.keep_prefixes`).

    Attributes:
        max_tokens: maximum number of tokens of one request, prompt and generated tokens together; at most the capacity
            of the pool.
        counts: number of requests and tokens since the start, by name.
    """

    def __init__(
        self,
        model: Any,
        pool: ContinuousBatchingConfig | None = None,
        max_tokens: int | None = None,
        *,
        prefix_bytes: int = 0,
    ):
        self.model, self.config = model, GenerationConfig(do_sample=False, eos_token_id=-1)
        self.manager = model.init_continuous_batching(self.config, pool or ContinuousBatchingConfig())
        self.max_tokens: int = min(self.manager.max_tokens, max_tokens or self.manager.max_tokens)
        self.manager.keep_prefixes(prefix_bytes)
        self.manager.on_prefix, self.manager.draw = self._count_prefix, self._draw
        # discard the outputs of cancelled requests, which nothing reads
        self.manager.output_router.output_queue = _Discard()
        self.counts = dict.fromkeys(("requests", "failed", "cancelled", "prompt_tokens", "generated_tokens"), 0)
        self._sampling: dict[str, Sampling] = {}
        self._ids = itertools.count()

    def __enter__(self) -> Engine:
        self.manager.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.manager.stop(block=True, timeout=10)
        self.manager.destroy()

    @property
    def running(self) -> bool:
        """True while the engine's thread runs."""
        return self.manager.is_running()

    @property
    def active(self) -> int:
        """Number of requests that wait or run: neither finished nor cancelled."""
        return len(self._sampling)

    @property
    def state_bytes(self) -> int:
        """Bytes of memory allocated for the states of requests."""
        return self.manager.model.states.allocated_nbytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the snapshots of states after the first tokens of prompts."""
        return self.manager.model.states.prefixes.nbytes

    @property
    def prefix_counts(self) -> dict[str, int]:
        """Counts of snapshots since the start, by name: hits, tokens that hits saved, evictions."""
        return self.manager.model.states.prefixes.counts

    def add(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        on_output: Callable[[Any], None],
        *,
        end_tokens: list[int],
        inputs: dict[str, Any] | None = None,
    ) -> str:
        """Add a request and return its id; must be called from a coroutine.

        Args:
            prompt: token ids.
            max_new_tokens: maximum number of tokens to generate.
            sampling: settings by which tokens are sampled.
            on_output: called in the caller's event loop after every token, with a `GenerationOutput` of transformers.
            end_tokens: token ids that end the request.
            inputs: further inputs of the model's mixers, such as `mode`.

        Raises:
            ValueError: the request is too long, token ids are outside the vocabulary, or the model does not take the
                inputs.
            RuntimeError: the engine has stopped.
        """
        vocab = self.model.config.get_text_config().vocab_size
        if max_new_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_new_tokens}")
        if len(prompt) + max_new_tokens > self.max_tokens:
            raise ValueError(
                f"{len(prompt)} tokens of the prompt and {max_new_tokens} new ones exceed the {self.max_tokens} tokens "
                "that a request may have (--max-model-len)"
            )
        self.manager.check_request(prompt, max_new_tokens)
        self.model.request_inputs(inputs or {}, len(prompt))
        if not all(0 <= token < vocab for token in prompt):
            raise ValueError(f"token ids must be in [0, {vocab})")
        if not self.running:
            raise RuntimeError("the engine has stopped")
        name = f"request-{next(self._ids)}"
        self._sampling[name] = sampling
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(prompt)

        def deliver(output: Any) -> None:
            if name not in self._sampling:
                # the request was cancelled in the meantime
                return
            if output.is_finished():
                self.counts["generated_tokens"] += len(output.generated_tokens)
                self.counts["failed"] += output.error is not None
                del self._sampling[name]
            on_output(output)

        self.manager.register_result_handler(name, deliver)
        self.manager.add_request(
            prompt,
            request_id=name,
            max_new_tokens=max_new_tokens,
            streaming=True,
            eos_token_id=end_tokens or -1,
            mixer_inputs=inputs,
        )
        return name

    def cancel(self, name: str) -> None:
        """End a request and free its state; does nothing for a request that has ended."""
        if self._sampling.pop(name, None) is not None:
            self.counts["cancelled"] += 1
            self.manager.cancel_request(name)
            with self.manager.output_router._lock:
                self.manager.output_router.result_handlers.pop(name, None)

    def _count_prefix(self, name: str, tokens: int) -> None:
        if (sampling := self._sampling.get(name)) is not None:
            sampling.cached_tokens = tokens

    def _draw(self, logits: Tensor, names: list[str]) -> Tensor:
        """Sample the next token of each request in a step."""
        return draw(logits, [self._sampling.get(name) or Sampling(0.0) for name in names])
