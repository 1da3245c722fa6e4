"""Measure the total attention probability of the slots, by layer, head and position (NHA paper, Figure 8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.data import mqar
from tokenmix_core.evaluation import (
    BUILT_IN_TEXT,
    MQAR_HELD_OUT,
    MQAR_LENGTHS,
    EvalOptions,
    Plot,
    Suite,
    SuiteResult,
    cut_sequences,
    layer_heatmap,
    one_sequence,
    text_tokens,
    text_vocab_size,
)
from tokenmix_nha import pretrained
from tokenmix_nha.mixer import NhaMixer
from tokenmix_nha.model_windows import nha_layer_indices, nha_mixers, windows_of

# number of columns in the heatmap over positions
_BINS = 64


@contextmanager
def observed_shares(mixers: list[NhaMixer]) -> Iterator[list[list[Tensor]]]:
    """Context manager: yield a list per mixer, to which each call without a cache appends its ω_L `[B, T, HQ]`."""
    for mixer in mixers:
        mixer.shares = []
    try:
        yield [mixer.shares for mixer in mixers if mixer.shares is not None]
    finally:
        for mixer in mixers:
            mixer.shares = None


@torch.inference_mode()
def slot_shares(model: Any, sequences: Int[Tensor, "N T"], *, batch_size: int = 8) -> Float[Tensor, "L HQ T"]:
    """Return ω_L (paper, equation 5), the slots' share of attention, by layer, head and position; a mean over rows.

    With one softmax over slots and window, ω_L is the total probability of the slots; in a weighted sum, it is the
    weight of the slots' output; in layers with a full window, it is the probability of the slots, which remain zero.
    """
    mixers = nha_mixers(model)
    total: Any = 0
    for batch in sequences.split(batch_size):
        with observed_shares(mixers) as shares:
            model(input_ids=batch.to(model.device), use_cache=False)
        total = total + torch.stack([calls[0].double().sum(0).T.cpu() for calls in shares])
    return total / len(sequences)


def share_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure the slots' share of attention on held-out text, by layer, layer and head, and layer and position."""
    options.choose("slot-share", ("slot-share",))
    length, count = options.one_length("slot-share", 1024), options.limit or 16
    sequences = cut_sequences(text_tokens(options.text, tokenizer, 4 * count * length), length, count)
    return _result("slot-share", model, sequences, options, {"text": options.text or BUILT_IN_TEXT})


def recall_share_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure the slots' share of attention on associative recall.

    Sequences begin with key-value pairs, which fill the first half unless the vocabulary has too few keys; then come
    the queries.
    """
    options.choose("slot-share-mqar", ("slot-share-mqar",))
    length, count = options.one_length("slot-share-mqar", max(MQAR_LENGTHS)), options.limit or 16
    size = options.vocab_size or min(8192, text_vocab_size(model))
    pairs = min(length // 4, size // 2 - 1)
    rows = mqar(count, seq_len=length, num_pairs=pairs, vocab_size=size, seed=options.seed, first=MQAR_HELD_OUT)
    return _result("slot-share-mqar", model, rows.input_ids, options, {"pairs": pairs, "vocab_size": size})


def _result(
    suite: str, model: Any, sequences: Int[Tensor, "N T"], options: EvalOptions, about: dict[str, Any]
) -> SuiteResult:
    shares, layers = slot_shares(model, sequences, batch_size=options.batch_size or 8), nha_layer_indices(model)
    length = sequences.shape[1]
    rows = [
        {
            "layer": layer,
            "window": window,
            "slots' share": float(share.mean()),
            "lowest head": float(share.mean(1).min()),
            "highest head": float(share.mean(1).max()),
            "first tenth": float(share[:, : max(1, length // 10)].mean()),
            "last tenth": float(share[:, -max(1, length // 10) :].mean()),
        }
        for layer, window, share in zip(layers, windows_of(model), shares, strict=True)
    ]
    width = max(1, -(-length // _BINS))
    binned = torch.stack([part.mean((1, 2)) for part in shares.split(width, 2)], 1)
    plots: list[Plot] = [
        {
            "title": "Share of the slots",
            "x": "layer",
            "y": "mean over heads and positions",
            "series": {"share": (list(layers), shares.mean((1, 2)).tolist())},
        },
        layer_heatmap("Share of the slots by head", "head", layers, shares.mean(2).tolist()),
        {
            **layer_heatmap("Share of the slots by position", "position (tokens)", layers, binned.tolist()),
            "x_labels": [str(column * width) for column in range(binned.shape[1])],
        },
    ]
    settings = {"length": length, "sequences": len(sequences), **about}
    return {"suite": suite, "settings": settings, "rows": rows, "plots": plots}


SUITES: dict[str, Suite] = {
    "slot-share": Suite(
        "share of attention on slots by layer, head and position; offline",
        share_suite,
        one_sequence(1024),
        ("lengths", "max_length", "text"),
    ),
    "slot-share-mqar": Suite(
        "the same on associative recall; offline", recall_share_suite, reads=("lengths", "max_length", "vocab_size")
    ),
    **pretrained.SUITES,
}
