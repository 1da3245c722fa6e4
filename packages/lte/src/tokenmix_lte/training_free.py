"""Eviction for pretrained attention without further training: TOVA, or a window and every n-th token before it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Literal, get_args

import torch

from tokenmix_core import check_new_folder
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_lte.config import LteConfig
from tokenmix_lte.model import LteForCausalLM

Method = Literal["tova", "uniform"]
_FIELDS = {field.name for field in dataclasses.fields(HybridConfig)}


def in_constant_memory(model: Any, method: Method, *, held: int = 1024) -> LteForCausalLM:
    """Return a model with the same weights whose full attention layers hold at most `held` tokens in evaluation.

    Args:
        model: a model of core or of this package, with layers of full attention.
        method: "tova" evicts the token that gets the least attention from the newest query; "uniform" holds a window of
            ¾ of the `held` tokens and, in the other ¼, every n-th token before the window.
        held: maximum number of tokens that a layer holds.

    Raises:
        ValueError: an unknown method, too few tokens, a model without full attention, or attention that the method does
            not support.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}, got {method!r}")
    if held < 4:
        raise ValueError(f"held must be at least 4, got {held}")
    config = model.config
    labels = list(dict.fromkeys(config.labels))
    options = {label: dict(config.mixer_options.get(label, {})) for label in labels}
    full = [x for x in labels if options[x].get("type", x) == "attention" and options[x].get("window") is None]
    if not full:
        raise ValueError(f"the model has no full attention layer; its mixers are {', '.join(sorted(labels))}")
    for label in full:
        options[label] = _options(options[label], method, held)
    fields = {name: value for name, value in config.to_diff_dict().items() if name in _FIELDS}
    changed = LteForCausalLM(LteConfig(**{**fields, "mixers": config.labels, "mixer_options": options}))
    changed.load_state_dict(model.state_dict())
    return changed.to(model.device, model.dtype).eval()


def _options(attention: dict[str, Any], method: Method, held: int) -> dict[str, Any]:
    """Return the options of a layer that holds at most `held` tokens, from the options `attention` of a full one."""
    kept = {name: x for name, x in attention.items() if name not in ("type", "window", "sinks", "impl")}
    if method == "tova":
        return {**kept, "type": "tova", "held": held}
    if not kept.pop("rope", True):
        raise ValueError("method 'uniform' needs attention with rope=True; use 'tova'")
    window = held * 3 // 4
    return {**kept, "type": "lte", "scorer": "uniform", "window": window, "cap": held - window, "sinks": 0}


def command(args: argparse.Namespace, context: Any) -> None:
    """Run the command `tokenmix-lte evict`: write a checkpoint whose attention evicts tokens, with its tokenizer."""
    from tokenmix_core.cli import load_model, load_tokenizer

    check_new_folder(args.out)
    model = load_model(args.checkpoint, torch.device("cpu"), "auto")
    if not isinstance(model, HybridForCausalLM):
        raise ValueError(f"{args.checkpoint} holds a {type(model).__name__}; expected a model that tokenmix trained")
    changed = in_constant_memory(model, args.method, held=args.held)
    tokenizer = load_tokenizer(args.checkpoint)
    changed.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    size = changed.state_bytes(32768, 1, torch.bfloat16)
    print(
        f"{args.out}: {args.method}, {args.held} tokens per layer, a cache of {size:,} bytes after 32,768 tokens in "
        "bfloat16"
    )
