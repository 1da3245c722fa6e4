"""Conversion of trained Gated DeltaNet or attention layers to NAtS-L layers, for further training."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenmix_core import check_new_folder
from tokenmix_core.modeling import (
    FAMILIES,
    HybridForCausalLM,
    attention_options,
    copy_companions,
    find_mixer,
    own_fields,
    own_state,
)
from tokenmix_nats_l.config import NatsLConfig
from tokenmix_nats_l.mixer import NatsL
from tokenmix_nats_l.model import NatsLForCausalLM

DELTA, ATTENTION = "gated_delta_net", "attention"
# options of Gated DeltaNet that NAtS-L layers do not have, each with its only value that can be converted
_DELTA_ONLY = {"allow_neg_eigval": False, "output_gate": True}
_ATTENTION_ONLY = {"window": None, "sinks": 0, "qkv_bias": False}


def convert(
    model: PreTrainedModel, *, layers: Sequence[int] | None = None, group: int = 1, chunk: int = 64
) -> NatsLForCausalLM:
    """Replace Gated DeltaNet or attention layers by NAtS-L layers, for further training.

    A Gated DeltaNet layer keeps its weights; those of the norm are doubled, because each operation starts with a weight
    of ½. The weights of scores and of the softmax heads' norm start at 0, so that all chunks are linear and, with
    `group=1`, the model at first computes the same as before. With a larger group, the norm of a head's outputs becomes
    one norm for each of its `group` slices, with the mean of the slices' weights.

    An attention layer keeps its projections and norms. Keys and values are repeated for each query head, and
    convolutions start as the identity. SiLU, delta rule and output gate are new, so that the model must be trained.

    Args:
        model: a model of this library with such layers, or a Llama, Mistral, Qwen2 or Qwen3 model of transformers.
        layers: indices of the layers to convert; None for all Gated DeltaNet and attention layers.
        group: number of softmax heads that share the types of one delta-rule head.
        chunk: number of tokens in a chunk, a multiple of 64.

    Raises:
        ValueError: layers that do not exist, are of another kind, or have options that NAtS-L does not have.
    """
    kinds, options, labels, fields, state = _parts(model)
    known = [i for i, kind in enumerate(kinds) if kind in (DELTA, ATTENTION)]
    chosen = known if layers is None else list(layers)
    if not chosen or set(chosen) - set(known):
        raise ValueError(
            f"layers must be some of the Gated DeltaNet and attention layers {', '.join(map(str, known)) or '(none)'}, "
            f"got {', '.join(map(str, chosen)) or 'none'}"
        )
    by_label = {labels[i]: options[i] | {"type": kinds[i]} for i in range(len(kinds)) if i not in chosen}
    for i in chosen:
        made = _options(i, kinds[i], _with_defaults(kinds[i], options[i]), fields["hidden_size"], group, chunk)
        same = (label for label, known in by_label.items() if known == made)
        labels[i] = next(same, f"nats_l_{i}" if any(x.get("type") == "nats_l" for x in by_label.values()) else "nats_l")
        by_label[labels[i]] = made
    config = NatsLConfig(**fields, mixers=labels, mixer_options=by_label)
    for i in chosen:
        prefix = f"model.layers.{i}.mixer."
        old = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
        mixer = _new_layer(config, i)
        (_from_delta if kinds[i] == DELTA else _from_attention)(mixer, old)
        wide = {prefix + name for name in NatsL.float32}
        for name, x in mixer.state_dict(prefix=prefix).items():
            state[name] = x if name in wide else x.to(model.dtype)
    converted = NatsLForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=model.dtype)
    converted.generation_config = model.generation_config
    return converted.to(model.device).train(model.training)


def _parts(
    model: PreTrainedModel,
) -> tuple[list[str], list[dict[str, Any]], list[str], dict[str, Any], dict[str, Tensor]]:
    """Return each layer's kind, options and label, the other fields of the new configuration, and the weights."""
    if not isinstance(model, HybridForCausalLM):
        options = attention_options(model.config)
        labels = [ATTENTION if x["window"] is None else f"{ATTENTION}-{x['window']}" for x in options]
        return [ATTENTION] * len(options), options, labels, own_fields(model.config), own_state(model)
    config, count = model.config, range(model.config.num_hidden_layers)
    kinds, options = [config.mixer_type(i) for i in count], [config.options_of(i) for i in count]
    return kinds, options, list(config.labels), own_fields(config), dict(model.state_dict())


def _with_defaults(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(find_mixer(kind).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | options


def _options(i: int, kind: str, old: dict[str, Any], width: int, group: int, chunk: int) -> dict[str, Any]:
    """Return the options of the NAtS-L layer that will replace layer i."""
    heads, of_values = old["num_heads"], old.get("num_v_heads")
    refused = {n: old[n] for n, v in (_DELTA_ONLY if kind == DELTA else _ATTENTION_ONLY).items() if old[n] != v}
    if of_values not in (None, heads):
        refused["num_v_heads"] = of_values
    if refused:
        told = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        raise ValueError(f"layer {i} cannot be converted: NAtS-L has no {told}; leave the layer out of `layers`")
    shared = {"type": "nats_l", "chunk": chunk}
    if kind == DELTA:
        sizes = {name: old[name] for name in ("head_dim", "expand_v", "conv_size")}
        return shared | sizes | {"num_heads": heads, "num_softmax_heads": group * heads}
    if group < 1 or heads % group:
        raise ValueError(f"group must divide the {heads} heads of layer {i}, got {group}")
    head_dim = width // heads if old["head_dim"] is None else old["head_dim"]
    sizes = {"num_heads": heads // group, "head_dim": group * head_dim, "expand_v": 1.0}
    return shared | sizes | {"num_softmax_heads": heads, "rope": old["rope"]}


@torch.no_grad()
def _new_layer(config: NatsLConfig, i: int) -> NatsL:
    """Return layer i of the new configuration with the initial weights of a new model."""
    mixer: Any = NatsL.from_config(config, i, **config.options_of(i))
    for module in mixer.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=config.initializer_range)
    return mixer


@torch.no_grad()
def _from_delta(mixer: NatsL, old: dict[str, Tensor]) -> None:
    norm = old.pop("o_norm.weight")
    mixer.load_state_dict(old, strict=False)
    assert mixer.score_proj is not None
    assert mixer.weight_proj is not None
    assert mixer.softmax_norm is not None
    for weight in (mixer.score_proj.weight, mixer.weight_proj.weight, mixer.softmax_norm.weight):
        weight.zero_()
    # both operations start with a weight of ½, for which doubled norm weights compensate
    mixer.linear_norm.weight.copy_(2 * norm.float().unflatten(0, (mixer.group, -1)).mean(0))


@torch.no_grad()
def _from_attention(mixer: NatsL, old: dict[str, Tensor]) -> None:
    for part in "kv":
        x = old[f"{part}_proj.weight"].unflatten(0, (-1, mixer.softmax_dim))
        old[f"{part}_proj.weight"] = x.repeat_interleave(mixer.num_softmax_heads // len(x), 0).flatten(0, 1)
    mixer.load_state_dict(old, strict=False)
    for conv in (mixer.q_conv, mixer.k_conv, mixer.v_conv):
        conv.weight.zero_()[:, -1] = 1


def command(args: argparse.Namespace, context: Any) -> None:
    """Run the command `tokenmix-nats-l convert`: convert layers of a checkpoint, or read one of the authors' code."""
    from tokenmix_core.cli import config_of, load_model
    from tokenmix_core.integrations import LAYOUTS as CORE_LAYOUTS
    from tokenmix_core.integrations import check_dtype, convert_folder, load_third_party, read_fields
    from tokenmix_nats_l.layouts import LAYOUTS

    source = Path(args.model)
    fields = read_fields(source)
    check_new_folder(args.out)
    check_dtype(args.dtype)
    if any(layout.fits(fields) for layout in LAYOUTS):
        converted = convert_folder(source, args.out, LAYOUTS, dtype=args.dtype)
    else:
        if any(layout.fits(fields) for layout in CORE_LAYOUTS):
            model = load_third_party(source, CORE_LAYOUTS, args.dtype)
        else:
            config = config_of(str(source), context)
            if config.model_type not in FAMILIES and not hasattr(config, "mixer_options"):
                known = ", ".join(FAMILIES)
                raise ValueError(
                    f"{source}: expected a model of this library, of type {known}, of FLA or of the authors' code, "
                    f"got {config.model_type!r}"
                )
            model = load_model(source, torch.device("cpu"), args.dtype)
        converted = convert(model, layers=args.layers, group=args.group, chunk=args.chunk)
        converted.save_pretrained(args.out)
        copy_companions(source, args.out)
    kinds = [converted.config.mixer_type(i) for i in range(converted.config.num_hidden_layers)]
    count = f"{kinds.count('nats_l')} of {len(kinds)} layers are NAtS-L"
    print(f"{args.out}: {converted.num_parameters():,} parameters, {count}")
