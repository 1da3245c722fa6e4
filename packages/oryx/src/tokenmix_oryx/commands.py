"""The mode options of the command line, and their application to a model."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tokenmix_oryx.evals import BY_MODE
from tokenmix_oryx.model import OryxForCausalLM
from tokenmix_oryx.modes import LINEAR


def chosen_modes(model: Any, args: argparse.Namespace) -> AbstractContextManager[None]:
    """Return a context manager that sets the model's modes by the options of `eval`, `generate`, `serve` or `bench`.

    Raises:
        ValueError: modes for a model that has none, or for a suite that sets them itself; invalid modes, or modes that
            contradict --no-keep-kv.
    """
    prefill, generation, keep_kv = args.prefill_mode, args.generation_mode, not args.no_keep_kv
    if prefill is None and generation is None and keep_kv:
        return nullcontext()
    if not isinstance(model, OryxForCausalLM):
        raise ValueError(
            f"--prefill-mode, --generation-mode and --no-keep-kv set the modes of an Oryx model, got one of type "
            f"{model.config.model_type!r}, which has no modes"
        )
    if own := [name for name in getattr(args, "suite", ()) if name in BY_MODE]:
        raise ValueError(f"suite {own[0]} sets the modes itself: omit the options of modes")
    if not keep_kv and generation is None:
        generation = LINEAR
    return model.modes(model.model.default_mode if prefill is None else prefill, generation, keep_kv=keep_kv)
