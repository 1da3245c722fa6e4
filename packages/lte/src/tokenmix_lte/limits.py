"""Evaluate a trained model with another window or cap (the limit on the retained keys of a head), or without a cap."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmix_lte.evals import lte_layers


@contextmanager
def using_retention(model: Any, args: argparse.Namespace) -> Iterator[None]:
    """Context manager: the LTE layers have the limits `args.cap` and `args.window`; a limit of None does not change.

    With the cap "none", a head retains every key with a positive logit, up to the model's `max_position_embeddings`,
    and states allocate slots for this number of keys.

    Raises:
        ValueError: a cap below the number of sinks, or a window narrower than the number of tokens that a scorer reads.
    """
    if args.cap is None and args.window is None:
        yield
        return
    layers = list(lte_layers(model).values())
    saved = [(layer.cap, layer.window, layer.score_every) for layer in layers]
    try:
        for layer in layers:
            layer.set_limits(cap=_cap(args.cap, model), window=args.window)
        changed = {name: x for name, x in (("cap", args.cap), ("window", args.window)) if x is not None}
        # the results of evaluations then list these limits among their settings
        model.evaluation_settings = lambda: changed
        yield
    finally:
        vars(model).pop("evaluation_settings", None)
        for layer, limits in zip(layers, saved, strict=True):
            layer.cap, layer.window, layer.score_every = limits


def _cap(text: str | None, model: Any) -> int | None:
    if text == "none":
        return model.config.max_position_embeddings
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(f"--cap must be a number of keys, or none, got {text!r}") from None
