"""A model's loss by position on long sequences, and the loss of a bigram model as a baseline."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.options import EvalOptions, Plot, Series, SuiteResult
from tokenmix_core.evaluation.split_rows import split_token_losses

MAX_BIGRAM_VOCABULARY = 4096


@torch.inference_mode()
def token_losses(model: Any, input_ids: Int[Tensor, "B T"], *, piece: int | None = None) -> Float[Tensor, "B T-1"]:
    """Return −log p(token t + 1 | tokens 0 … t) in nats, float32, for any causal language model of transformers.

    Args:
        model: the model; it should be in evaluation mode.
        input_ids: the tokens, on the model's device.
        piece: number of tokens in one forward pass; later passes read the earlier tokens from the model's cache. By
            default the whole sequence, or as many tokens as keep the logits of one row below an eighth of the GPU's
            memory (1 GiB on a CPU).

    Raises:
        ValueError: sequences of fewer than two tokens, or fewer than one token in a pass.
    """
    length = input_ids.shape[1]
    if length < 2:
        raise ValueError(f"token_losses: sequences need at least 2 tokens, got {length}")
    if piece is not None and piece < 1:
        raise ValueError(f"token_losses: piece must be positive, got {piece}")
    on_gpu = input_ids.device.type == "cuda"
    budget = torch.cuda.get_device_properties(input_ids.device).total_memory // 8 if on_gpu else 2**30
    # bytes of a token's float32 logits and their log-softmax
    token_bytes = 8 * text.text_vocab_size(model)
    chunk = piece or max(16, budget // token_bytes)
    # reduce the number of rows in a pass first: passes over whole sequences need no cache
    rows = max(1, budget // (token_bytes * min(chunk, length)))
    losses = [_row_losses(model, batch, chunk) for batch in input_ids.split(rows)]
    return torch.cat(losses)


def _row_losses(model: Any, input_ids: Tensor, chunk: int) -> Tensor:
    targets = input_ids[:, 1:]
    inputs = input_ids[:, :-1]
    if inputs.shape[1] <= chunk:
        return _cross_entropy(model(input_ids=inputs, use_cache=False).logits, targets)
    # a late import: `info` lists the suites and should not import models
    from tokenmix_core.modeling import CACHE

    cache, losses = None, []
    for start in range(0, inputs.shape[1], chunk):
        output = model(input_ids=inputs[:, start : start + chunk], use_cache=True, **{CACHE: cache})
        cache = getattr(output, CACHE)
        losses.append(_cross_entropy(output.logits, targets[:, start : start + chunk]))
    return torch.cat(losses, 1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def loss_by_position(
    model: Any, sequences: Int[Tensor, "N T"], *, batch_size: int = 8, progress: bool = True
) -> Float[np.ndarray, "T-1"]:
    """Return `token_losses`, averaged over the sequences in float64; entry t is the loss of token t + 1."""
    return _sequence_losses(model, sequences, batch_size, progress, split_rows=False).mean(0, dtype=np.float64)


def _sequence_losses(
    model: Any, sequences: Int[Tensor, "N T"], batch_size: int, progress: bool, split_rows: bool
) -> Float[np.ndarray, "N T-1"]:
    """Return `token_losses` of all sequences, in batches; with `split_rows`, ranks divide each row."""
    losses, losses_of = [], split_token_losses if split_rows else token_losses
    progress_bar = tqdm(
        total=sequences.numel(), unit="tok", unit_scale=True, desc="loss by position", disable=not progress
    )
    with progress_bar:
        for batch in sequences.split(batch_size):
            losses.append(losses_of(model, batch.to(model.device)).cpu().numpy())
            progress_bar.update(batch.numel())
    return np.concatenate(losses)


def smooth(values: Float[np.ndarray, "T"], window: int) -> Float[np.ndarray, "T"]:
    """Return the centred moving average of `values` over `window` entries, over fewer at both ends."""
    if window < 1:
        raise ValueError(f"smooth: window must be positive, got {window}")
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + (window + 1) // 2, len(values))
    return (sums[high] - sums[low]) / (high - low)


def bigram_loss(train: Int[np.ndarray, "n"], held_out: Int[np.ndarray, "*N T"], vocab_size: int) -> float:
    """Return a baseline: the mean loss, in nats, on the sequences `held_out` of a bigram model made from `train`.

    p(b | a) = (n(a, b) + p(b)) / (n(a) + 1), where p(b) = (n(b) + 1) / (n + vocab_size): counts of pairs are smoothed
    by counts of single tokens, and these by the uniform distribution.

    Raises:
        ValueError: a vocabulary of more than 4,096 tokens, whose pairs are mostly too rare, a token outside the
            vocabulary, or too few tokens.
    """
    if not 1 <= vocab_size <= MAX_BIGRAM_VOCABULARY:
        raise ValueError(f"bigram_loss: vocab_size must be from 1 to {MAX_BIGRAM_VOCABULARY}, got {vocab_size}")
    train, held_out = np.asarray(train, dtype=np.int64), np.asarray(held_out, dtype=np.int64)
    if len(train) < 2 or held_out.ndim < 1 or held_out.shape[-1] < 2:
        raise ValueError(f"bigram_loss: needs at least 2 tokens of each, got {len(train)} and {list(held_out.shape)}")
    if (top := max(train.max(), held_out.max())) >= vocab_size:
        raise ValueError(f"bigram_loss: token {top} does not lie in a vocabulary of {vocab_size}")
    single = np.bincount(train, minlength=vocab_size)
    pairs = np.bincount(train[:-1] * vocab_size + train[1:], minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    p = (single + 1) / (len(train) + vocab_size)
    p = (pairs + p) / (pairs.sum(1, keepdims=True) + 1)
    return float(-np.log(p[held_out[..., :-1], held_out[..., 1:]]).mean())


def cut_sequences(tokens: Int[np.ndarray, "n"], length: int, limit: int) -> Int[Tensor, "N T"]:
    """Return at most `limit` sequences of `length` tokens that do not overlap, spread evenly over `tokens`.

    Raises:
        ValueError: fewer tokens than one sequence.
    """
    if len(tokens) < length:
        raise ValueError(f"a text of {len(tokens)} tokens is too short for a sequence of {length}")
    count = min(limit, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64) if count > 1 else np.zeros(1, dtype=np.int64)
    return torch.from_numpy(np.stack([np.asarray(tokens[s : s + length]) for s in starts]).astype(np.int64))


def perplexity_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure the loss by position on text, at the largest of `options.lengths` (by default 2,048 tokens).

    The rows have the mean loss in ranges of positions and of all positions. If the text has a training part and the
    vocabulary is small, a last row has the loss of a bigram model of that part.
    """
    options.choose("perplexity-by-position", ("perplexity-by-position",))
    length = options.one_length("perplexity-by-position", 2048)
    limit = options.limit or 64
    sequences = cut_sequences(text.text_tokens(options.text, tokenizer, 4 * limit * length), length, limit)
    batch_size, split = options.batch_size or 8, options.split_rows
    by_sequence = _sequence_losses(model, sequences, batch_size, options.progress, split)
    losses = by_sequence.mean(0, dtype=np.float64)
    rate = text.bytes_per_token(sequences.numpy(), tokenizer)

    def row(predictor: str, position: str, nats: float, predictions: int) -> dict[str, Any]:
        bits = nats / math.log(2) / rate if rate else None
        loss = {"loss": nats, "perplexity": math.exp(nats), "bits per byte": bits}
        return {"predictor": predictor, "position": position, **loss, "tokens": predictions * len(sequences)}

    edges = [0, *(2**k for k in range(6, 40) if 2**k < len(losses)), len(losses)]
    rows = [
        row("model", f"{low + 1}-{high}", float(losses[low:high].mean()), high - low)
        for low, high in itertools.pairwise(edges)
    ]
    rows.append(row("model", "all", float(losses.mean()), len(losses)))
    spans = [*itertools.pairwise(edges), (0, len(losses))]
    samples = [by_sequence[:, low:high].mean(1, dtype=np.float64).tolist() for low, high in spans]
    curve = np.exp(smooth(losses, max(1, length // 64)))
    points = np.unique(np.geomspace(1, len(losses), min(len(losses), 400)).astype(np.int64))
    series: Series = {"model": (points.tolist(), curve[points - 1].tolist())}
    vocabulary = len(tokenizer)
    if vocabulary <= MAX_BIGRAM_VOCABULARY and (train := text.training_tokens(options.text, tokenizer)) is not None:
        nats = bigram_loss(train, sequences.numpy(), vocabulary)
        rows.append(row("bigram", "all", nats, len(losses)))
        samples.append([])
        series["bigram"] = ([1, len(losses)], [math.exp(nats)] * 2)
    title = f"Perplexity by position, {len(sequences)} sequences, smoothed"
    plot: Plot = {"title": title, "x": "position (tokens)", "y": "perplexity", "log_x": True, "series": series}
    settings = {"length": length, "sequences": len(sequences), "text": options.text or text.BUILT_IN_TEXT}
    result: SuiteResult = {"suite": "perplexity-by-position", "settings": settings, "rows": rows, "plots": [plot]}
    return {**result, "samples": samples}
