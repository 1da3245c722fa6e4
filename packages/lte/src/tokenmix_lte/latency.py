"""Time of a hybrid model's other layers, prefilling and decoding, and of scoring in them (Figures 4b and 4c)."""

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

from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.efficiency import curve, settings_of
from tokenmix_core.evaluation.options import EvalOptions, SuiteResult
from tokenmix_core.evaluation.perplexity import cut_sequences
from tokenmix_lte.mixer import Lte

# by default: prompts to prefill; the prompt to decode after, and how many tokens; sequences; runs, after one to warm up
LENGTHS = (1024, 2048, 4096)
PROMPT, STEPS = 4096, 128
BATCH, RUNS = 32, 5


class Clock:
    """Milliseconds that calls of some modules take: between two CUDA events each on a GPU, by the host's clock else."""

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
        """Give the milliseconds since the last question, after waiting for the device."""
        marks, self._marks = self._marks, []
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        if self.cuda:
            torch.cuda.synchronize()
            return sum(begin.elapsed_time(end) for begin, end in pairs)
        return 1e3 * sum(end - begin for begin, end in pairs)

    def remove(self) -> None:
        """Time no more calls."""
        for hook in self._hooks:
            hook.remove()


@contextmanager
def clocks(model: Any) -> Iterator[tuple[Clock, Clock]]:
    """Within it, the time of a model's layers that are not linear, and of the scorers in them.

    Raises:
        ValueError: a model without layers that keep keys, or whose mixers are not told apart.
    """
    mixers: list[Any] = list(getattr(getattr(model, "model", None), "mixers", ()))
    timed = [m for m in mixers if any(part.keeps_tokens for part in m.make_state().parts.values())]
    if not timed:
        raise ValueError(f"latency needs a model with layers that keep keys, got {type(model).__name__} without any")
    scorers = [m.scorer for m in timed if isinstance(m, Lte) and m.scorer is not None]
    pair = Clock(timed, model.device), Clock(scorers, model.device)
    try:
        yield pair
    finally:
        for clock in pair:
            clock.remove()


@torch.inference_mode()
def prefill_latency(model: Any, ids: Int[Tensor, "B T"], *, runs: int = RUNS) -> dict[str, Any]:
    """A table row of a prompt's time: the mean of the middle ones of some runs, their fastest and slowest left out."""
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
    """A table row of the mean time of a token, after a prompt: the last `steps` of `ids`, half as many to warm up.

    Steps are those of the text, called one by one and not as recorded graphs, so that layers can be told apart.
    """
    warm_up = steps // 2
    prompt = ids.shape[1] - steps - warm_up
    cache = model(input_ids=ids[:, :prompt], use_cache=True, logits_to_keep=1).cache
    with clocks(model) as (of_layers, of_scoring):
        for t in range(prompt, ids.shape[1]):
            model(input_ids=ids[:, t : t + 1], cache=cache)
            if t + 1 == prompt + warm_up:
                for clock in (of_layers, of_scoring):
                    clock.milliseconds()
        ms, part = of_layers.milliseconds() / steps, of_scoring.milliseconds() / steps
    return {"phase": "decoding", "context": prompt, "batch": len(ids), "ms": ms, "scoring ms": part}


def latency_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Prefill by length and decoding after the longest, of all layers that keep keys, batch 32, on real text."""
    tasks = options.choose("latency", ("prefill", "decoding"))
    lengths, batch = sorted(options.lengths or LENGTHS), options.batch_size or BATCH
    prompt, steps = (lengths[-1] if options.lengths else PROMPT), STEPS
    longest = max(prompt + steps + steps // 2, lengths[-1])
    # the same text again where there is too little for all rows
    tokens = text.tokens(options.text, tokenizer, batch * longest)
    found = cut_sequences(tokens, min(longest, len(tokens)), batch)
    ids = found.repeat(-(-batch // len(found)), -(-longest // found.shape[1]))[:batch, :longest].to(model.device)
    rows = []
    if "prefill" in tasks:
        chosen = tqdm(lengths, desc="latency", unit="length", disable=not options.progress)
        rows += [prefill_latency(model, ids[:, :length], runs=options.limit or RUNS) for length in chosen]
    plots = [curve("Prefill, layers that keep keys", "ms", rows, {"ms": "layers", "scoring ms": "of it scoring"})]
    if "decoding" in tasks:
        rows.append(decode_latency(model, ids[:, : prompt + steps + steps // 2], steps=steps))
    settings = settings_of(model) | {"runs": options.limit or RUNS, "text": options.text or text.BUILT_IN}
    return {"suite": "latency", "settings": settings, "rows": rows, "plots": plots if "prefill" in tasks else []}
