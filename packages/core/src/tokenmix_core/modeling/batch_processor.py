"""The loop of continuous batching: launch a step, then read the tokens of the step before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from tokenmix_core.kernels.launch.async_read import Asked, to_device
from tokenmix_core.modeling.batch_scheduler import INPUTS, RequestScheduler, Scheduled, TokenPool

# default of `max_batch_tokens`
_STEP_TOKENS = 8192


class Flight(NamedTuple):
    """The new tokens of a step that is launched, on the device and on their way to the host.

    Attributes:
        names, states: the requests that get a token.
        tokens: their tokens, on the device.
        read, logprobs: copies of the tokens, and of their log-probabilities if these are asked for.
    """

    names: list[str]
    states: list[RequestState]
    tokens: Int[Tensor, "n"]
    read: Asked
    logprobs: Asked | None


class BatchProcessor(ContinuousBatchProcessor):
    """Runs the steps of a manager of continuous batching, on the states of `RequestStates`.

    transformers' queues, request objects and delivery of outputs are used. A step takes the tokens of the step
    before from the device, so that it is launched before the host reads them: a request that ends by a token has one
    more token computed, which is dropped.

    Args:
        manager: the manager, a `HybridBatchingManager`.
    """

    # the lag by one step is in this class: transformers' loop is the synchronous one
    use_async_batching = False
    scheduler: RequestScheduler

    def __init__(self, manager: Any):
        config, model = manager.continuous_batching_config, manager.model
        self.manager, self.states, self.cb_config = manager, model.states, config
        self.cache = TokenPool(config.num_blocks, config.page_size, model.states)  # type: ignore[assignment]
        self.scheduler = RequestScheduler(
            self.cache,  # type: ignore[arg-type]
            model.states,
            config.safety_margin,
            config.max_requests_per_batch,
            lambda *args: manager.on_prefix(*args),
        )
        self.max_batch_tokens = config.max_batch_tokens or _STEP_TOKENS
        self.do_sample = bool(getattr(manager.generation_config, "do_sample", True))
        self.input_queue, self.cancel_queue = manager.input_queue, manager.cancel_queue
        self.output_router, self.background_thread_status = manager.output_router, manager.background_thread_status
        self.distributed_helper, self.logit_processor = manager.distributed_helper, manager.logit_processor
        self.distributed_helper.set_tp_seed(config.seed, model.device)
        # the engine keeps registered options with a request, even if the request is preempted or forked
        self.logit_processor.supported_keys[INPUTS] = dict
        self.device = model.device
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        # transformers waits for this stream before a pause
        self.inputs_and_outputs = SimpleNamespace(compute_stream=stream)  # type: ignore[assignment]
        self._batch: list[Scheduled] = []
        self._launched: Flight | None = None
        self._flight: Flight | None = None

    def __repr__(self) -> str:
        active, waiting = self.scheduler.active_requests, self.scheduler.waiting_requests
        return f"{type(self).__name__}({len(active)} active and {len(waiting)} waiting requests)"

    def reset(self) -> None:
        """Drop all requests."""
        for name in [*self.scheduler.active_requests]:
            self.scheduler.finish_request(name)
        self.scheduler.reset()
        self.states.clear()
        self._flight = self._launched = None

    def warmup(self, model: Any) -> None:
        """Do nothing: decoding steps are captured when they first occur."""

    def prepare_next_batch(self) -> bool:
        """Schedule the next step; return False if there is nothing to compute."""
        if self._update_tp_group_state():
            return False
        self.scheduler.clear_cancelled_requests()
        while True:
            self.states.begin_step()
            self.scheduler.fork_requests()
            batch = self.scheduler.schedule_batch(self.max_batch_tokens)
            if batch:
                self._batch = batch
                return True
            if self._flight is not None:
                # requests that end by these tokens leave memory to others
                self._finish(self._flight)
                self._flight = None
            elif batch is None:
                self.scheduler.preempt()
            elif not self.scheduler._requests_to_fork:
                return False

    @torch.no_grad()
    def _generation_step(self, model: Any) -> None:
        """Launch the scheduled step."""
        batch = self._batch
        ids = self._ids(batch)
        chunks = [x.chunk for x in batch]
        logits = self.states.run(chunks, ids.unsqueeze(0))
        rows = [i for i, x in enumerate(batch) if x.samples]
        self._launched = None
        if not rows:
            return
        states = [batch[i].state for i in rows]
        if len(rows) < len(batch):
            logits = logits.index_select(0, to_device(rows, self.device))
        names = [x.request_id for x in states]
        if self.manager.draw is not None:
            tokens, logprobs = self.manager.draw(logits, names), None
        else:
            tokens, logprobs = self._sample(logits, ids, [batch[i] for i in rows])
        read = Asked(tokens)
        self._launched = Flight(names, states, tokens, read, None if logprobs is None else Asked(logprobs))

    def update_batch(self) -> None:
        """Read the tokens of the step before the one that was launched last."""
        done, self._flight = self._flight, self._launched
        if done is not None:
            self._finish(done)

    def fail_all_requests(self, error: Exception) -> None:
        """End all requests by an error."""
        self._flight = self._launched = None
        for state in [*self.scheduler.active_requests.values(), *self.scheduler.waiting_requests.values()]:
            self._handle_request_error(error, state)
            self.scheduler.finish_request(state.request_id)
        self.scheduler.reset()

    def _ids(self, batch: list[Scheduled]) -> Int[Tensor, "T"]:
        """Return the step's tokens: those in flight from the device, the others from the host."""
        flight, names = self._flight, [x.chunk.request for x in batch if x.tokens is None]
        prompts = [token for x in batch[len(names) :] for token in x.tokens or ()]
        if flight is None:
            known = [x.state.generated_tokens[-1] for x in batch[: len(names)]]
            return to_device([*known, *prompts], self.device, torch.int64)
        if names == flight.names:
            decoded, given = flight.tokens, prompts
        else:
            at = {name: i for i, name in enumerate(flight.names)}
            known = [x.state.generated_tokens[-1] for x in batch[: len(names)] if x.chunk.request not in at]
            others = iter(range(len(at), len(at) + len(known)))
            index = [at[name] if name in at else next(others) for name in names]
            source = torch.cat((flight.tokens, to_device(known, self.device, torch.int64))) if known else flight.tokens
            decoded, given = source.index_select(0, to_device(index, self.device, torch.int64)), prompts
        return torch.cat((decoded, to_device(given, self.device, torch.int64))) if given else decoded

    def _sample(
        self, logits: Float[Tensor, "n vocab"], ids: Int[Tensor, "T"], parts: list[Scheduled]
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"] | None]:
        """Return the next token of each request and, if asked for, its log-probability."""
        if (processors := self.logit_processor).do_processing:
            logits = logits.float()
            given = torch.zeros(processors.tensors_required, len(logits), dtype=torch.int32, device=self.device)
            processors.prepare_tensor_args([FutureRequestState(x.state, True, {}, 1) for x in parts], given)
            ends, end = {}, 0
            for x in self._batch:
                end += x.chunk.tokens
                ends[x.chunk.request] = end - 1
            last = ids.index_select(0, to_device([ends[x.chunk.request] for x in parts], self.device))
            logits = processors(last, logits, given)  # type: ignore[arg-type]
        if not self.do_sample and not self.cb_config.return_logprobs:
            return logits.argmax(-1), None
        probs = logits.float().softmax(-1)
        tokens = torch.multinomial(probs, 1) if self.do_sample else probs.argmax(-1, keepdim=True)
        logprobs = probs.gather(1, tokens).squeeze(1).log() if self.cb_config.return_logprobs else None
        return tokens.squeeze(1), logprobs

    def _finish(self, flight: Flight) -> None:
        """Wait for a step's tokens, append them to their requests, and deliver outputs."""
        tokens, active = flight.read.read_list(), self.scheduler.active_requests
        logprobs = [None] * len(tokens) if flight.logprobs is None else flight.logprobs.read_list()
        outputs = []
        for name, state, token, logprob in zip(flight.names, flight.states, tokens, logprobs, strict=True):
            if active.get(name) is not state:
                # the request has ended, or was cancelled, since the step was launched
                continue
            if state.update_and_check_completion(token, logprob):
                self.scheduler.finish_request(name)
                self.scheduler.block_new_requests = False
                outputs.append(state.to_generation_output())
            elif state.streaming:
                outputs.append(state.to_generation_output())
        if outputs:
            self.output_router.deliver_batch(outputs)
