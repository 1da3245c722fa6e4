"""Loss on the second copy of a passage, by the distance between the copies: a measure of recall in running text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.options import EvalOptions, Plot, Series, SuiteResult, one_sequence
from tokenmix_core.evaluation.perplexity import cut_sequences, token_losses

PASSAGE = 32
SHORTEST = 16
DEFAULT_LENGTH = 2048


def copy_distances(length: int) -> tuple[int, list[int]]:
    """Return the passage's length and a list of distances between its two copies, for sequences of `length` tokens.

    The passage is an eighth of the sequence, at most 32 tokens. At the first distance the copies are adjacent. Each
    further distance is twice as long, except the last, at which a passage's length of text precedes the first copy.

    Raises:
        ValueError: sequences of fewer than 16 tokens.
    """
    if length < SHORTEST:
        raise ValueError(f"copy needs sequences of at least {SHORTEST} tokens, got {length}")
    passage = min(PASSAGE, length // 8)
    farthest = length - 2 * passage
    return passage, [*(d for k in range(40) if (d := passage << k) < farthest), farthest]


def with_copy(windows: Int[Tensor, "N W"], length: int, passage: int, distance: int | None) -> Int[Tensor, "N T"]:
    """Return sequences of text that end in a passage and also contain it `distance` tokens earlier.

    Args:
        windows: running text of `2 * (length - passage)` tokens, whose second half begins with the passage.
        length: number of tokens in a sequence.
        passage: number of tokens in the passage.
        distance: number of tokens from the start of one copy to the start of the other. With None, the text before the
            passage is that of another window, so that the sequence has only the last copy.
    """
    before = length - passage
    copy = windows[:, before : before + passage]
    start = before if distance is None else distance
    read = windows.roll(1, 0) if distance is None else windows
    return torch.cat([read[:, start : start + before], copy], 1)


def copy_losses(
    model: Any, windows: Int[Tensor, "N W"], length: int, passage: int, distance: int | None, *, batch_size: int = 8
) -> tuple[Float[np.ndarray, "N n"] | None, Float[np.ndarray, "N n"]]:
    """Return the losses, in nats, of the passage's tokens in the first copy (None if there is none) and in the last.

    Args:
        windows, length, passage, distance: as for `with_copy`.
    """
    batches = with_copy(windows, length, passage, distance).split(batch_size)
    losses = torch.cat([token_losses(model, batch.to(model.device)).double().cpu() for batch in batches]).numpy()
    # losses[:, t] is the loss of token t + 1, so the last `passage` losses are those of the last copy
    at = losses.shape[1] - passage
    first = None if distance is None else losses[:, at - distance : at - distance + passage]
    return first, losses[:, at:]


def copy_needs(options: EvalOptions) -> int:
    """Return the minimum number of text tokens with which the suite can run: two windows of 2 · (length − passage)."""
    length = one_sequence(DEFAULT_LENGTH)(options)
    return 4 * (length - copy_distances(length)[0])


def copy_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure the loss on a held-out passage's second copy, at the end of a sequence, by the distance between copies.

    The same passages are also measured at the same position in sequences without a first copy. "saved" is the loss in
    the latter minus the loss of the second copy, that is the gain by recall; its standard error is taken over passages.
    The sequence length is the largest of `options.lengths` (2,048 tokens by default).

    Raises:
        ValueError: sequences of fewer than 16 tokens, or only one window of text.
    """
    length = options.one_length("copy", DEFAULT_LENGTH)
    limit, batch_size = options.limit or 64, options.batch_size or 8
    passage, distances = copy_distances(length)
    cases = {f"copy-{length}-{distance}": distance for distance in distances}
    chosen = options.choose("copy", tuple(cases))
    wide = 2 * (length - passage)
    windows = cut_sequences(text.text_tokens(options.text, tokenizer, 4 * limit * wide), wide, limit)
    if len(windows) < 2:
        raise ValueError(
            f"copy compares passages of several windows of text, {wide} tokens each, got one; raise the limit above 1, "
            "or give a longer text or smaller lengths"
        )
    _, unseen = copy_losses(model, windows, length, passage, None, batch_size=batch_size)
    rows: list[dict[str, Any]] = []
    within: Series = {}
    for name in tqdm(chosen, desc="copy", unit="distance", disable=not options.progress):
        distance = cases[name]
        first, second = copy_losses(model, windows, length, passage, distance, batch_size=batch_size)
        assert first is not None
        saved = (unseen - second).mean(1)
        row = {"task": name, "distance": distance, "first copy": float(first.mean())}
        row |= {"second copy": float(second.mean()), "not seen before": float(unseen.mean())}
        row |= {"saved": float(saved.mean()), "stderr": float(saved.std(ddof=1) / math.sqrt(len(saved)))}
        rows.append({**row, "passages": len(saved)})
        within[f"second copy, {distance} tokens on"] = (list(range(1, passage + 1)), second.mean(0).tolist())
    within["not seen before"] = (list(range(1, passage + 1)), unseen.mean(0).tolist())
    shown = [float(row["distance"]) for row in rows]
    by_distance: Series = {
        name: (shown, [row[name] for row in rows]) for name in ("first copy", "second copy", "not seen before")
    }
    y = "loss (nats a token)"
    title = f"A passage of {passage} tokens and its copy"
    plots: list[Plot] = [
        {"title": title, "x": "distance (tokens)", "y": y, "log_x": True, "series": by_distance},
        {"title": title, "x": "token of the passage", "y": y, "series": within},
    ]
    settings = {"length": length, "passage": passage, "text": options.text or text.BUILT_IN_TEXT}
    return {"suite": "copy", "settings": settings, "rows": rows, "plots": plots}
