"""Conversion of pretrained transformers: their weights are kept, and new scorers first retain every key."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tokenmix_core import check_new_folder
from tokenmix_core.modeling import FAMILIES, attention_options, copy_companions, own_fields, own_state
from tokenmix_core.nn import HeadWeights
from tokenmix_lte.config import LteConfig
from tokenmix_lte.mixer import FIRST_WEIGHT
from tokenmix_lte.model import LteForCausalLM
from tokenmix_lte.scorers import FIXED, Scorers, make_scorer


def convert(
    model: PreTrainedModel,
    *,
    layers: Sequence[int] | None = None,
    window: int = 768,
    cap: int = 512,
    sinks: int = 4,
    scorer: Scorers = "cnn",
    dropout: float = 0.1,
) -> LteForCausalLM:
    """Replace a model's attention by LTE for further training; return the new model.

    All weights are the original's own tensors. A new scorer returns the logit ½ for every input, so that all keys are
    retained. At first, a converted full attention layer therefore returns the original's outputs: in training at any
    length, in evaluation up to window + cap tokens. A converted windowed layer sees further back than before.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 language model of transformers.
        layers: indices of the layers that get LTE; None for all. All other layers keep their attention.
        window: LTE's window; a layer whose own window is narrower keeps that window.
        cap, sinks, scorer, dropout: the same as for `Lte`.

    Raises:
        ValueError: an unsupported model, indices of layers that do not exist, or invalid options of `Lte`.
    """
    attention = attention_options(model.config)
    chosen = range(len(attention)) if layers is None else layers
    if not set(chosen) <= set(range(len(attention))) or not chosen:
        raise ValueError(
            f"layers must be some of 0 to {len(attention) - 1}, got {', '.join(map(str, chosen)) or 'none'}"
        )
    state: dict[str, Tensor] = own_state(model)
    labels, options = [], {}
    for i, layer in enumerate(attention):
        kind, width = "attention", layer["window"]
        if i in chosen:
            kind, width = "lte", window if width is None else min(window, width)
            layer = layer | {"window": width, "cap": cap, "sinks": sinks, "scorer": scorer, "dropout": dropout}
            state |= _new_scorer(layer, f"model.layers.{i}.mixer.", model)
        label = kind if width is None else f"{kind}-{width}"
        labels.append(label)
        options[label] = layer | {"type": kind}
    config = LteConfig(**own_fields(model.config), mixers=labels, mixer_options=options)
    converted = LteForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype)
    converted.generation_config = model.generation_config
    return converted.to(model.device).train(model.training)


@torch.no_grad()
def _new_scorer(options: dict[str, Any], prefix: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return, by parameter name, the weights of a new scorer and the initial factors λ of its sparsity loss.

    A scorer without parameters has neither.
    """
    heads, scorer = options["num_kv_heads"], options["scorer"]
    made = make_scorer(scorer, heads, 2 * options["head_dim"], options["dropout"], None)
    if made is None:
        assert scorer in FIXED
        return {}
    # with weights of 0, every logit is the last bias until the first training step
    made.weight.zero_()  # type: ignore[operator]
    parts = {"scorer": made.to(model.dtype), "sparsity": HeadWeights(heads, initial=FIRST_WEIGHT)}
    return {f"{prefix}{part}.{name}": x for part, module in parts.items() for name, x in module.state_dict().items()}


def command(args: argparse.Namespace, context: Any) -> None:
    """Run the command `tokenmix-lte convert`, which converts a checkpoint in a folder."""
    from tokenmix_core.cli import config_of, is_checkpoint, load_model
    from tokenmix_core.integrations import check_dtype

    source = Path(args.model)
    if not is_checkpoint(source):
        raise ValueError(f"{args.model} holds no model: expected a folder with config.json and weights")
    check_new_folder(args.out)
    check_dtype(args.dtype)
    config = config_of(str(source), context)
    if config.model_type not in FAMILIES:
        raise ValueError(f"{source}: expected a model of type {', '.join(FAMILIES)}, got {config.model_type!r}")
    model = load_model(source, torch.device("cpu"), args.dtype)
    options = {name: getattr(args, name) for name in ("layers", "window", "cap", "sinks", "scorer")}
    converted = convert(model, **options)
    converted.save_pretrained(args.out)
    copy_companions(source, args.out)
    kinds = [converted.config.mixer_type(i) for i in range(converted.config.num_hidden_layers)]
    held = {n: converted.state_bytes(n, 1, torch.bfloat16) for n in (2048, 32768)}
    print(
        f"{args.out}: {converted.num_parameters():,} parameters, {kinds.count('lte')} of {len(kinds)} layers evict; "
        + ", ".join(f"a cache of {size:,} bytes after {n:,} tokens" for n, size in held.items())
    )
