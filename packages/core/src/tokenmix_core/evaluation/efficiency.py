"""Speed and memory by context length: prefill, decoding token by token and the bytes of the cache; training steps."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.options import EvalOptions, Plot, Series, Suite, SuiteResult

LENGTHS = (512, 1024, 2048, 4096)
_LATENCIES = {
    "prefill ms": "prefill",
    "decode ms/token": "decode, one token",
    "floor ms/token": "reading weights and cache",
}
_SIZES = {"cache bytes": "cache", "cache bytes, decoded": "cache after decoding", "peak bytes": "peak"}
DECODE_TOKENS = 32


class Stopwatch:
    """Measures the seconds that work on a device takes, by CUDA events on a GPU and by the CPU's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work()` takes; the host waits for the device once, at the end."""
        if not self.cuda:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of a GPU's peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Return a table column with the peak memory that torch allocated on a GPU since `reset_peak`; {} on other devices.

    On a CPU, the peak of the process would include its libraries and earlier work.
    """
    return {"peak bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def cache_bytes(cache: Any, *, allocated: bool = True) -> int:
    """Return the number of bytes of a cache.

    Args:
        cache: the cache. If no attribute of the cache gives its bytes, the storages of its tensors are added up.
        allocated: whether to count spare capacity.
    """
    if isinstance(nbytes := getattr(cache, "allocated_nbytes" if allocated else "nbytes", None), int):
        return nbytes
    storages: dict[int, int] = {}
    seen: set[int] = set()

    def visit(x: Any) -> None:
        if id(x) in seen:
            return
        seen.add(id(x))
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(x, dict):
            for value in x.values():
                visit(value)
        elif isinstance(x, list | tuple | set):
            for value in x:
                visit(value)
        elif hasattr(x, "__dict__") and not isinstance(x, type | torch.nn.Module) and not callable(x):
            visit(vars(x))

    visit(cache)
    return sum(storages.values())


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a decoding step reads.

    It reads all weights, except an input embedding that is not tied to the output layer, of which it reads few rows.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is not None and output.weight is embedding.weight
    total = sum(p.nbytes for p in model.parameters())
    return total if tied else total - embedding.weight.nbytes


@functools.cache
def bytes_a_second(device: torch.device) -> float:
    """Return memory bandwidth in bytes per second: the best of five sums over 1 GiB (on a CPU over 64 MiB)."""
    x = torch.ones((1 << 30 if device.type == "cuda" else 1 << 26) // 4, device=device)
    x.sum()
    watch = Stopwatch(device)
    return x.nbytes / min(watch.time(x.sum) for _ in range(5))


def random_prompt(model: Any, batch_size: int, length: int, seed: int = 0) -> Int[Tensor, "B T"]:
    """Return random tokens `[batch_size, length]` of the model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, text.text_vocab_size(model), (batch_size, length), generator=generator)


def _prompts(
    model: Any, tokenizer: Any, options: EvalOptions, lengths: list[int]
) -> tuple[list[Int[Tensor, "B T"]], str]:
    """Return a prompt for each length, and the name of the text that they are from; random tokens without a tokenizer.

    The prompts are text, because the cost of some layers depends on the data. A text that is too short is repeated.

    Raises:
        ValueError: the text has tokens beyond the model's vocabulary, or cannot be read.
    """
    batch = options.batch_size or 1
    if tokenizer is None:
        return [random_prompt(model, batch, length, options.seed) for length in lengths], "random tokens"
    count = batch * max(lengths)
    tokens = text.text_tokens(options.text, tokenizer, count).astype(np.int64)
    if (most := int(tokens.max())) >= (size := text.text_vocab_size(model)):
        raise ValueError(f"the text has token {most}, beyond the model's vocabulary of {size}: another tokenizer's")
    name = (options.text or text.BUILT_IN_TEXT) + (", repeated" if len(tokens) < count else "")
    whole = torch.from_numpy(np.resize(tokens, count))
    return [whole[: batch * length].view(batch, length) for length in lengths], name


def _shares(auxiliary: Any) -> dict[str, float]:
    """Return the mean of each auxiliary tensor named `..._share`; the cost of the layers depends on these."""
    means = {
        name.replace("_", " "): statistics.fmean(float(x.float().mean()) for x in values)
        for name, values in (auxiliary or {}).items()
        if name.endswith("_share")
    }
    return means


@torch.inference_mode()
def measure_inference(
    model: Any,
    length: int,
    *,
    batch_size: int = 1,
    decode_tokens: int = DECODE_TOKENS,
    repeats: int = 3,
    prompt: Int[Tensor, "B T"] | None = None,
) -> dict[str, Any]:
    """Time a prefill of `prompt` (`length` random tokens by default), then `decode_tokens` greedy decoding steps.

    A model of this library has a method `decoding`, which takes the cache and returns a context manager; in this
    context, steps run as in `generate`, and the first step of each repetition is not timed.

    Returns:
        A table row: median times over `repeats` after one warm-up; a lower bound of the time per token, which is the
        time to read the weights and the cache's content once; the bytes allocated for the cache, spare capacity
        included, after the prefill and after decoding; on a GPU, the peak memory; the fractions on which the cost of
        layers depends for this prompt, such as the fraction of softmax chunks.
    """
    # a late import: `info` lists the suites and should not import models
    from tokenmix_core.modeling import CACHE

    device = model.device
    prompt = (random_prompt(model, batch_size, length) if prompt is None else prompt).to(device)
    watch = Stopwatch(device)
    prefills, steps = [], []
    allocated, decoded, content = 0, 0, 0
    decoding: Any = getattr(model, "decoding", nullcontext)

    def prefill() -> Any:
        return model(input_ids=prompt, use_cache=True, logits_to_keep=1)

    for repeat in range(repeats + 1):
        if repeat == 1:
            reset_peak(device)
        outputs: list[Any] = []
        seconds = watch.time(lambda: outputs.append(prefill()))  # noqa: B023
        output = outputs.pop()

        def decode(tokens: int, output: Any = output) -> None:
            logits, cache = output.logits, getattr(output, CACHE)
            for _ in range(tokens):
                logits = model(input_ids=logits[:, -1:].argmax(-1), use_cache=True, **{CACHE: cache}).logits

        with decoding(getattr(output, CACHE)):
            # measure inside `decoding`, because an Oryx model may drop keys and values there (`modes`, `keep_kv`)
            allocated, content = (cache_bytes(getattr(output, CACHE), allocated=which) for which in (True, False))
            # one step that is not timed: it may move the cache to the storage of a captured graph
            decode(1)
            step = watch.time(lambda: decode(decode_tokens)) / decode_tokens
        decoded = cache_bytes(getattr(output, CACHE))
        del output, decode
        if repeat:
            prefills.append(seconds)
            steps.append(step)
    seconds, step = statistics.median(prefills), statistics.median(steps)
    floor = (weight_bytes(model) + content) / bytes_a_second(device)
    peak = peak_bytes(device)
    backbone: Any = getattr(model, "model", None)
    auxiliary = backbone(prompt, use_cache=False).auxiliary if hasattr(backbone, "mixers") else None
    return {
        "context": length,
        "batch": batch_size,
        "prefill ms": 1e3 * seconds,
        "prefill tokens/s": batch_size * length / seconds,
        "decode ms/token": 1e3 * step,
        "floor ms/token": 1e3 * floor,
        "decode tokens/s": batch_size / step,
        "cache bytes": allocated,
        "cache bytes, decoded": decoded,
        **peak,
        **_shares(auxiliary),
    }


def measure_training(
    model: Any,
    length: int,
    *,
    batch_size: int = 1,
    repeats: int = 3,
    prompt: Int[Tensor, "B T"] | None = None,
) -> dict[str, Any]:
    """Time forward and backward passes over `batch_size` sequences; return a table row of medians and fractions.

    Tokens are random if no `prompt` is given; the fractions are those that `measure_inference` returns.
    """
    device = model.device
    tokens = (random_prompt(model, batch_size, length) if prompt is None else prompt).to(device)
    watch = Stopwatch(device)
    was_training = model.training
    model.train()
    seconds, auxiliary = [], None

    def step() -> None:
        nonlocal auxiliary
        model.zero_grad(set_to_none=True)
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        auxiliary = getattr(output, "auxiliary", None)
        output.loss.backward()

    try:
        for repeat in range(repeats + 1):
            if repeat == 1:
                reset_peak(device)
            taken = watch.time(step)
            if repeat:
                seconds.append(taken)
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    median = statistics.median(seconds)
    return {
        "context": length,
        "batch": batch_size,
        "step ms": 1e3 * median,
        "tokens/s": batch_size * length / median,
        **peak_bytes(device),
        **_shares(auxiliary),
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's name or, on a CPU, the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def settings_of(model: Any) -> dict[str, Any]:
    """Return the settings of a model on which its speed depends, without batch size and length."""
    return {
        "device": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "parameters": model.num_parameters(),
    }


def curve(title: str, y: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Plot:
    """Return a plot over context length with a curve for each column in `columns` that all `rows` have.

    `columns` maps each column to its curve's name.
    """
    series: Series = {
        name: ([row["context"] for row in rows], [row[column] for row in rows])
        for column, name in columns.items()
        if all(row.get(column) is not None for row in rows)
    }
    return {"title": title, "x": "context (tokens)", "y": y, "log_x": True, "log_y": True, "series": series}


def efficiency_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure prefill and decode latency, cache bytes and peak memory by context length, by default at batch size 1."""
    options.choose("efficiency", ("efficiency",))
    lengths = sorted(options.lengths or LENGTHS)
    rows, settings = _measured(measure_inference, "inference", model, tokenizer, options, lengths)
    plots = [curve("Latency", "ms", rows, _LATENCIES), curve("Memory", "bytes", rows, _SIZES)]
    return {"suite": "efficiency", "settings": settings, "rows": rows, "plots": plots}


def training_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Time forward and backward passes by context length, by default at batch size 1, without the optimiser."""
    lengths = sorted(options.lengths or LENGTHS)
    rows, settings = _measured(measure_training, "training", model, tokenizer, options, lengths)
    plots = [curve("Training", "tokens/s", rows, {"tokens/s": "forward and backward"})]
    return {"suite": "training", "settings": settings, "rows": rows, "plots": plots}


def _measured(
    measure: Callable[..., dict[str, Any]],
    name: str,
    model: Any,
    tokenizer: Any,
    options: EvalOptions,
    lengths: list[int],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row per length, and the settings that all rows share."""
    prompts, source = _prompts(model, tokenizer, options, lengths)
    rows = [
        measure(model, prompt.shape[1], batch_size=len(prompt), repeats=options.limit or 3, prompt=prompt)
        for prompt in tqdm(prompts, desc=name, unit="length", disable=not options.progress)
    ]
    return rows, settings_of(model) | {"prompt": source}


# the suites that the command `bench` can run
BENCH_SUITES = {
    "training": Suite("forward and backward passes by context", training_suite, reads=("lengths", "text")),
    "efficiency": Suite(
        "prefill and decode latency, memory, cache bytes by context; offline",
        efficiency_suite,
        reads=("lengths", "text"),
    ),
}
