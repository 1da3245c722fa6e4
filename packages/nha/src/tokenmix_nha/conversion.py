"""Conversion of a pretrained transformer to Native Hybrid Attention (paper, section 4.6, appendix C.2)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tokenmix_core import check_new_folder
from tokenmix_core.modeling import copy_companions
from tokenmix_nha.hybridized import FAMILIES
from tokenmix_nha.model_windows import nha_mixers
from tokenmix_nha.windows import FULL, Window, check_windows, hybrid_windows


def convert(
    model: PreTrainedModel, windows: Window | Sequence[Window], *, slots: int = 64, gate_normalizer: float = 8.0
) -> Any:
    """Return the model with its attention layers replaced by NHA.

    The Q, K, V and O weights with their biases and norms are kept, gates start as average-pooled K projections, and all
    other weights are the original's own tensors. With full windows and no slots, the converted model computes the same
    outputs as the original.

    Args:
        model: a Llama, Qwen2, Qwen3 or Qwen3-MoE language model of transformers.
        windows: one window for all layers, or a list with one per layer.
        slots: M, number of slots of every key head; 0 for none.
        gate_normalizer: τ, by which the log-gates are divided.

    Raises:
        ValueError: another model type, a model without its output layer or with sliding windows of its own, or an
            invalid window.
    """
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"convert: expected a model of type {', '.join(FAMILIES)}, got {kind!r}")
    config_class, _, causal_lm = FAMILIES[kind]
    if not isinstance(model, causal_lm.__bases__[-1]):
        raise ValueError(f"convert: expected a language model with its output layer, got {type(model).__name__}")
    fields = model.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "dtype"):
        fields.pop(name, None)
    layers = model.config.num_hidden_layers
    fields |= {"window": check_windows(windows, layers, slots), "slots": slots, "gate_normalizer": gate_normalizer}
    config = config_class.from_dict(fields)
    with torch.device("meta"):
        converted = causal_lm(config)
    state = dict(model.state_dict())
    for name, weight in pooled_gates(model, slots).items():
        state[name] = weight
    # assign=True uses the original's tensors without a copy
    converted.load_state_dict(state, strict=True, assign=True)
    converted.tie_weights()
    _restore_buffers(converted, model)
    converted.generation_config = model.generation_config
    return converted.train(model.training)


@torch.no_grad()
def pooled_gates(model: PreTrainedModel, slots: int) -> dict[str, Float[Tensor, "rows D"]]:
    """Return the gates' weights and biases by name: key projections, with each head's K rows average-pooled to M."""
    gates: dict[str, Tensor] = {}
    if not slots:
        return gates
    for name, module in model.named_modules():
        if not name.endswith("self_attn"):
            continue
        heads = model.config.num_key_value_heads
        for part in ("weight", "bias"):
            k = getattr(module.k_proj, part)
            if k is not None:
                by_head = k.detach().unflatten(0, (heads, -1)).reshape(heads, module.head_dim, -1)
                pooled = torch.nn.functional.adaptive_avg_pool1d(by_head.transpose(1, 2).float(), slots)
                gates[f"{name}.f_proj.{part}"] = pooled.transpose(1, 2).reshape(-1, *k.shape[1:]).to(k.dtype)
    return gates


def _restore_buffers(converted: Any, model: PreTrainedModel) -> None:
    """Let the converted model share the original's buffers, such as rotary frequencies.

    Raises:
        ValueError: a parameter or buffer of the converted model is still on the meta device.
    """
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(converted.get_submodule(owner), last, buffer)
    if missing := [n for n, t in [*converted.named_parameters(), *converted.named_buffers()] if t.is_meta]:
        raise ValueError(f"convert: the original has nothing for {', '.join(missing)}")


def command(args: argparse.Namespace, context: Any) -> None:
    """Run the command `tokenmix-nha convert`, for a transformer's checkpoint or a GLA or GSA checkpoint of FLA."""
    from tokenmix_core.cli import config_of, load_model
    from tokenmix_core.integrations import check_dtype, convert_folder, layout_of, read_fields
    from tokenmix_nha.layouts import LAYOUTS

    source = Path(args.model)
    fields = read_fields(source)
    check_new_folder(args.out)
    check_dtype(args.dtype)
    if any(layout.fits(fields) for layout in LAYOUTS):
        model = convert_folder(source, args.out, LAYOUTS, dtype=args.dtype)
        what = layout_of(fields, LAYOUTS).what
        print(f"{args.out}: {what}, {model.num_parameters():,} parameters; import tokenmix_nha to load it")
        return
    config = config_of(str(source), context)
    if config.model_type not in FAMILIES:
        known = ", ".join((*FAMILIES, "gla", "gsa"))
        raise ValueError(f"{source}: expected a model of type {known}, got {config.model_type!r}")
    layers = config.num_hidden_layers
    windows = FULL if args.full_layers == "all" else hybrid_windows(layers, args.window, args.full_layers)
    model = load_model(source, torch.device("cpu"), args.dtype)
    converted = convert(model, windows, slots=args.slots)
    converted.save_pretrained(args.out)
    copy_companions(source, args.out)
    full = sum(mixer.window == FULL for mixer in nha_mixers(converted))
    held = {n: converted.state_bytes(n, 1, torch.bfloat16) for n in (2048, 32768)}
    print(
        f"{args.out}: {converted.num_parameters():,} parameters, {full} of {layers} layers full; "
        + ", ".join(f"{size:,} bytes kept of {n:,} tokens" for n, size in held.items())
    )
