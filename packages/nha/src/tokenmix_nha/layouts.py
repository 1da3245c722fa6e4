"""Layouts of FLA's checkpoints of gated linear attention and gated slot attention."""

from __future__ import annotations

from tokenmix_core.integrations import Fields, Layout, Names, fla_config, fla_names, hybrid_mixers
from tokenmix_core.modeling import HybridConfig

_NO_CONVOLUTION = "q, k and v are not convolved"


def _read_gla(fields: Fields) -> tuple[HybridConfig, Names]:
    heads = fields.number("num_heads", default=4)
    for name, known, why in (
        ("use_short_conv", (False,), _NO_CONVOLUTION),
        ("use_output_gate", (True,), "outputs are gated"),
        ("feature_map", (None,), "queries and keys are the projections themselves"),
        ("clamp_min", (None,), "gates have no lower bound"),
        ("num_kv_heads", (None, heads), "every query head has its own keys and values"),
        ("use_gk", (True,), "keys' channels are gated"),
        ("use_gv", (False,), "values' channels are not gated"),
    ):
        fields.only(name, *known, why=why)
    options = {
        "num_heads": heads, "expand_k": float(fields.get("expand_k", default=0.5)),
        "expand_v": float(fields.get("expand_v", default=1.0)),
    }  # fmt: skip
    # the norm has another name in FLA if it is fused with the gate
    norm = "g_norm_swish_gate" if fields.get("fuse_norm", default=True) else "g_norm"
    names: Names = {f"{part}_proj.weight": f"{part}_proj.weight" for part in "qkvgo"}
    names |= {"a_down_proj.weight": "gk_proj.0.weight", "a_up_proj.weight": "gk_proj.1.weight"}
    names |= {"a_up_proj.bias": "gk_proj.1.bias", "o_norm.weight": f"{norm}.weight"}
    layers = fields.number("num_hidden_layers", default=24)
    mixers, by_label, by_layer, rope = hybrid_mixers(fields, layers, "gla", options, names)
    config = fla_config(fields, mixers, by_label, rope_parameters=rope or None)
    return config, fla_names(config, by_layer)


def _read_gsa(fields: Fields) -> tuple[HybridConfig, Names]:
    for name, known, why in (
        ("use_short_conv", (False,), _NO_CONVOLUTION),
        ("feature_map", ("swish",), "queries and keys pass through a SiLU"),
        ("expand_k", (1, 1.0), "heads share the model's width"),
        ("expand_v", (1, 1.0), "heads share the model's width"),
        ("clamp_min", (None,), "gates have no bounds"),
        ("clamp_max", (None,), "gates have no bounds"),
    ):
        fields.only(name, *known, why=why)
    heads = fields.number("num_heads", default=4)
    options = {
        "num_heads": heads, "num_kv_heads": fields.get("num_kv_heads", default=heads),
        "slots": fields.number("num_slots", default=64),
        "gate_normalizer": float(fields.get("gate_logit_normalizer", default=8)),
    }  # fmt: skip
    names: Names = {f"{part}_proj.weight": f"{part}_proj.weight" for part in "qkvfo"}
    names |= {"o_norm.weight": "g_norm.weight"}
    layers = fields.number("num_hidden_layers", default=24)
    mixers, by_label, by_layer, rope = hybrid_mixers(fields, layers, "gated_slot_attention", options, names)
    config = fla_config(fields, mixers, by_label, rope_parameters=rope or None)
    return config, fla_names(config, by_layer)


LAYOUTS = (
    Layout("FLA's GLA", lambda fields: fields.get("model_type") == "gla", _read_gla, ignored=("rotary.inv_freq",)),
    Layout("FLA's GSA", lambda fields: fields.get("model_type") == "gsa", _read_gsa, ignored=("rotary.inv_freq",)),
)
