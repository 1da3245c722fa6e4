"""Latency of hybrid models' layers with a KV cache, and of their scorers, in prefill and decoding (paper, Figure 4)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm import tqdm

from tokenmix_core.evaluation import (
    BUILT_IN_TEXT,
    EvalOptions,
    Parts,
    SuiteResult,
    curve,
    cut_sequences,
    settings_of,
    text_tokens,
)
from tokenmix_lte.mixer import Lte

# defaults of the suite: lengths of the prompts to prefill, in tokens
LENGTHS = (1024, 2048, 4096)
# length of the prompt before decoding, and number of decoded tokens
PROMPT, STEPS = 4096, 128
# number of sequences, and number of timed runs after one warm-up run
BATCH, RUNS = 32, 5


class Clock:
    """A timer of all calls of the given modules, in milliseconds: by CUDA events on a GPU, else by the CPU's clock."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.cuda, self._marks = device.type == "cuda", []
        self._hooks = [
            hook
            for module in modules
            for hook in (module.register_forward_pre_hook(self._mark), module.register_forward_hook(self._mark))
        ]

    def _mark(self, *_unused: Any) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> float:
        """Wait for the device; return the milliseconds measured since the previous call of this method."""
        marks, self._marks = self._marks, []
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if self.cuda:
            torch.cuda.synchronize()
            return sum(begin.elapsed_time(end) for begin, end in pairs)
        return 1e3 * sum(end - begin for begin, end in pairs)

    def remove(self) -> None:
        """Stop timing by removing the hooks."""
        for hook in self._hooks:
            hook.remove()


@contextmanager
def clocks(model: Any) -> Iterator[tuple[Clock, Clock]]:
    """Context manager that times a model's layers with a KV cache, and the scorers in them; it yields both timers.

    Raises:
        ValueError: the model has no layer with a KV cache.
    """
    mixers: list[Any] = list(getattr(getattr(model, "model", None), "mixers", ()))
    timed = [m for m in mixers if any(part.keeps_tokens for part in m.make_state().parts.values())]
    if not timed:
        raise ValueError(f"latency needs a model with layers that have a KV cache, got {type(model).__name__} without")
    scorers = [m.scorer for m in timed if isinstance(m, Lte) and m.scorer is not None]
    pair = Clock(timed, model.device), Clock(scorers, model.device)
    try:
        yield pair
    finally:
        for clock in pair:
            clock.remove()


@torch.inference_mode()
def prefill_latency(model: Any, ids: Int[Tensor, "B T"], *, runs: int = RUNS) -> dict[str, Any]:
    """Return a table row with the time of the layers with a KV cache, and of their scorers, to prefill `ids`.

    Times are means of all runs except the fastest and the slowest; a first run is not timed.
    """
    layers, scoring = [], []
    with clocks(model) as (of_layers, of_scoring):
        for run in range(runs + 1):
            model(input_ids=ids, use_cache=True, logits_to_keep=1)
            times = of_layers.milliseconds(), of_scoring.milliseconds()
            if run:
                layers.append(times[0])
                scoring.append(times[1])
    order = sorted(range(runs), key=layers.__getitem__)
    middle = order[1:-1] or order
    ms, part = (statistics.mean(x[i] for i in middle) for x in (layers, scoring))
    return {"phase": "prefill", "context": ids.shape[1], "batch": len(ids), "ms": ms, "scoring ms": part}


@torch.inference_mode()
def decode_latency(model: Any, ids: Int[Tensor, "B T"], *, steps: int = STEPS) -> dict[str, Any]:
    """Return a table row with the time of the layers with a KV cache, and of their scorers, to decode one token.

    Times are means over the last `steps` tokens of `ids`. Up to `steps` / 2 tokens before them are decoded as warm-up.
    "context" is the number of tokens before the first timed one. Tokens are taken from `ids`, not sampled. Steps run
    eagerly instead of as CUDA graphs, so that each layer can be timed.
    """
    context = ids.shape[1] - steps
    warm_up = min(steps // 2, context - 1)
    prompt = context - warm_up
    cache = model(input_ids=ids[:, :prompt], use_cache=True, logits_to_keep=1).cache
    with clocks(model) as (of_layers, of_scoring):
        for t in range(prompt, ids.shape[1]):
            model(input_ids=ids[:, t : t + 1], cache=cache)
            if t + 1 == prompt + warm_up:
                for clock in (of_layers, of_scoring):
                    clock.milliseconds()
        ms, part = of_layers.milliseconds() / steps, of_scoring.milliseconds() / steps
    return {"phase": "decoding", "context": context, "batch": len(ids), "ms": ms, "scoring ms": part}


def latency_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Time all layers with a KV cache on a text: prefill for several lengths, and decoding after the longest prompt."""
    tasks = options.choose("latency", ("prefill", "decoding"))
    lengths, batch = sorted(options.lengths or LENGTHS), options.batch_size or BATCH
    prompt, steps = (lengths[-1] if options.lengths else PROMPT), STEPS
    longest = max(prompt + steps, lengths[-1])
    # repeat the text if it is too short for all rows
    tokens = text_tokens(options.text, tokenizer, batch * longest)
    found = cut_sequences(tokens, min(longest, len(tokens)), batch)
    ids = found.repeat(-(-batch // len(found)), -(-longest // found.shape[1]))[:batch, :longest].to(model.device)
    rows, parts = [], Parts()
    for length in tqdm(lengths if "prefill" in tasks else (), desc="latency", disable=not options.progress):
        with parts.part(f"prefill of {length:,} tokens"):
            rows.append(prefill_latency(model, ids[:, :length], runs=options.limit or RUNS))
    plots = [curve("Prefill, layers with a KV cache", "ms", rows, {"ms": "layers", "scoring ms": "of which scoring"})]
    if "decoding" in tasks:
        with parts.part(f"decoding after {prompt:,} tokens"):
            rows.append(decode_latency(model, ids[:, : prompt + steps], steps=steps))
    settings = settings_of(model) | {"runs": options.limit or RUNS, "text": options.text or BUILT_IN_TEXT}
    drawn = plots if "prefill" in tasks else []
    return parts.result({"suite": "latency", "settings": settings, "rows": rows, "plots": drawn})
