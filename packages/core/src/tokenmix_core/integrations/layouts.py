"""The layouts that core reads: FLA's Transformer, Gated DeltaNet and Mamba-2; Mamba-2 of state-spaces and transformers.

FLA's Transformer and Gated DeltaNet can also be written. Sources: fla-core 0.6 (`fla/models`), mamba_ssm 2.3
(`models/config_mamba.py`, `modules/mamba2.py`), transformers 5.23 (`models/mamba2`).
"""

from __future__ import annotations

from typing import Any

from tokenmix_core.integrations.checkpoints import Fields, Layout, Names
from tokenmix_core.modeling import HybridConfig
from tokenmix_core.nn.mlp import swiglu_width

ATTENTION, DELTA, MAMBA2 = "attention", "gated_delta_net", "mamba2"
_SILU = ("swish", "silu")
# epsilon of FLA's q/k norms if the configuration states none
_QK_NORM_EPS = 1e-5
_MLP = ("gate_proj", "up_proj", "down_proj")


def fla_config(fields: Fields, mixers: list[str], options: dict[str, dict[str, Any]], **more: Any) -> HybridConfig:
    """Return our configuration for a model of FLA that has an MLP in each layer."""
    fields.only("hidden_act", *_SILU, why="the MLP is a SwiGLU")
    fields.only("attnres_block_size", None, why="residuals are added, not attended to")
    fields.only("elementwise_affine", True, None, why="norms have weights")
    width = fields.number("hidden_size")
    intermediate = fields.get("intermediate_size")
    if intermediate is None:
        intermediate = swiglu_width(width, fields.get("hidden_ratio", default=4))
    return common_config(
        fields, mixers, options, hidden_size=width, intermediate_size=intermediate,
        norm_eps=fields.get("norm_eps", default=1e-6),
        tie_word_embeddings=fields.get("tie_word_embeddings", default=False),
        max_position_embeddings=fields.get("max_position_embeddings", default=2048), **more,
    )  # fmt: skip


def common_config(fields: Fields, mixers: list[str], options: dict[str, dict[str, Any]], **values: Any) -> HybridConfig:
    """Return our configuration with the given values and those fields that have the same names in all libraries."""
    tokens = {name: fields.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    values = {"vocab_size": fields.get("vocab_size", default=32000), **values}
    # drop special tokens outside the vocabulary, which some configurations have
    tokens = {n: i for n, i in tokens.items() if not isinstance(i, int) or 0 <= i < values["vocab_size"]}
    values["initializer_range"] = fields.get("initializer_range", default=0.02)
    return HybridConfig(num_hidden_layers=len(mixers), mixers=mixers, mixer_options=options, **tokens, **values)


def fla_names(config: HybridConfig, mixer_names: list[Names]) -> Names:
    """Return FLA's names of all weights of a model with an MLP in each layer; `mixer_names` has those of each mixer."""
    names: Names = {
        "model.embed_tokens.weight": "model.embeddings.weight",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    for i, own in enumerate(mixer_names):
        ours, theirs = f"model.layers.{i}", f"model.layers.{i}"
        names |= {f"{ours}.mixer_norm.weight": f"{theirs}.attn_norm.weight"}
        names |= {f"{ours}.mlp_norm.weight": f"{theirs}.mlp_norm.weight"}
        names |= {f"{ours}.mlp.{part}.weight": f"{theirs}.mlp.{part}.weight" for part in _MLP}
        names |= {f"{ours}.mixer.{a}": None if b is None else f"{theirs}.attn.{b}" for a, b in own.items()}
    return names


def attention_names(*, qkv_bias: bool, qk_norm: bool) -> Names:
    """Return FLA's names of the weights that an attention layer with these options has; they are the same as ours."""
    names = [f"{part}_proj.weight" for part in "qkvo"]
    names += [f"{part}_proj.bias" for part in "qkv"] if qkv_bias else []
    names += [f"{part}_norm.weight" for part in "qk"] if qk_norm else []
    return {name: name for name in names}


def delta_names(*, output_gate: bool) -> Names:
    """Return FLA's names of the weights of a Gated DeltaNet layer, with or without an output gate."""
    names: Names = {f"{part}_proj.weight": f"{part}_proj.weight" for part in "qkvabo"}
    names |= {f"{part}_conv.weight": f"{part}_conv1d.weight" for part in "qkv"}
    names |= {name: name for name in ("A_log", "dt_bias", "o_norm.weight")}
    return names | ({"g_proj.weight": "g_proj.weight"} if output_gate else {})


def _rope(fields: Fields, theta: Any) -> dict[str, Any]:
    if not isinstance(theta, int | float):
        raise fields.refused(f"rope_theta must be a number, got {theta!r}: without one there are no positions")
    return {"rope_type": "default", "rope_theta": float(theta)}


def _read_transformer(fields: Fields) -> tuple[HybridConfig, Names]:
    # transformers 5 writes rope_parameters, earlier versions rope_theta
    theta = (fields.get("rope_parameters") or {}).get("rope_theta", fields.get("rope_theta", default=10000.0))
    heads = fields.number("num_heads", default=32)
    bias, norm = fields.get("qkv_bias", default=False), fields.get("qk_norm", default=False)
    options: dict[str, Any] = {
        "num_heads": heads, "num_kv_heads": fields.get("num_kv_heads", default=heads), "qkv_bias": bias,
        "qk_norm": norm, "window": fields.get("window_size"),
    }  # fmt: skip
    if norm:
        options["qk_norm_eps"] = _QK_NORM_EPS
    layers = fields.number("num_hidden_layers", default=24)
    rope = _rope(fields, theta)
    config = fla_config(fields, [ATTENTION] * layers, {ATTENTION: options}, rope_parameters=rope)
    return config, fla_names(config, [attention_names(qkv_bias=bias, qk_norm=norm)] * layers)


def hybrid_mixers(
    fields: Fields, layers: int, label: str, options: dict[str, Any], names: Names
) -> tuple[list[str], dict[str, dict[str, Any]], list[Names], dict[str, Any]]:
    """Parse FLA's field `attn`, which lists the layers that have attention.

    Returns:
        Labels of the layers, options by label, names of weights by layer, and rotary parameters.
    """
    mixers, by_label, by_layer = [label] * layers, {label: options}, [names] * layers
    specs = fields.get("attn", default=[])
    thetas: list[float] = []
    for n, spec in enumerate([specs] if isinstance(specs, dict) else specs):
        if not isinstance(spec, dict) or not {"layers", "num_heads"} <= set(spec):
            raise fields.refused(f"attn must name layers and num_heads, got {spec!r}")
        own = ATTENTION if not n else f"{ATTENTION}_{n + 1}"
        bias = bool(spec.get("qkv_bias"))
        by_label[own] = {
            "type": ATTENTION, "num_heads": spec["num_heads"],
            "num_kv_heads": spec.get("num_kv_heads") or spec["num_heads"], "qkv_bias": bias,
            "window": spec.get("window_size"),
        }  # fmt: skip
        thetas.append(float(spec.get("rope_theta") or 10000.0))
        for i in spec["layers"]:
            if not isinstance(i, int) or not 0 <= i < layers:
                raise fields.refused(f"attn: there is no layer {i!r} among {layers}")
            mixers[i], by_layer[i] = own, attention_names(qkv_bias=bias, qk_norm=False)
    if len(set(thetas)) > 1:
        raise fields.refused(f"attn: rope_theta must be one for all layers, got {sorted(set(thetas))}")
    by_label = {name: value for name, value in by_label.items() if name in mixers}
    return mixers, by_label, by_layer, _rope(fields, thetas[0]) if thetas else {}


def _read_delta(fields: Fields) -> tuple[HybridConfig, Names]:
    fields.only("use_short_conv", True, why="q, k and v are convolved")
    fields.only("output_gate_activation", *_SILU, why="outputs are gated by a SiLU")
    gate, heads = fields.get("use_gate", default=True), fields.number("num_heads", default=6)
    options = {
        "num_heads": heads, "num_v_heads": fields.get("num_v_heads", default=heads),
        "head_dim": fields.number("head_dim", default=256), "expand_v": float(fields.get("expand_v", default=2.0)),
        "conv_size": fields.number("conv_size", default=4),
        "allow_neg_eigval": fields.get("allow_neg_eigval", default=False), "output_gate": gate,
    }  # fmt: skip
    layers = fields.number("num_hidden_layers", default=21)
    names = delta_names(output_gate=gate)
    mixers, by_label, by_layer, rope = hybrid_mixers(fields, layers, DELTA, options, names)
    config = fla_config(fields, mixers, by_label, rope_parameters=rope or None)
    return config, fla_names(config, by_layer)


def _mamba_names(config: HybridConfig, embedding: str, *, conv_bias: bool) -> Names:
    names: Names = {
        "model.embed_tokens.weight": f"backbone.{embedding}.weight",
        "model.norm.weight": "backbone.norm_f.weight",
        "lm_head.weight": "lm_head.weight",
    }
    own = {name: name for name in ("A_log", "D", "dt_bias", "in_proj.weight", "norm.weight", "out_proj.weight")}
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"backbone.layers.{i}"
        names[f"{ours}.mixer_norm.weight"] = f"{theirs}.norm.weight"
        names |= {f"{ours}.mixer.{name}": f"{theirs}.mixer.{name}" for name in own}
        names[f"{ours}.mixer.conv.weight"] = f"{theirs}.mixer.conv1d.weight"
        names[f"{ours}.mixer.conv.bias"] = f"{theirs}.mixer.conv1d.bias" if conv_bias else None
    return names


def _read_mamba2(fields: Fields) -> tuple[HybridConfig, Names]:
    """Read a Mamba-2 configuration of FLA or of transformers; both have the same `model_type` and field names."""
    for name, known, why in (
        ("use_bias", (False, None), "projections have no biases"),
        ("hidden_act", ("silu", "swish", None), "inputs are activated by a SiLU"),
        ("rmsnorm", (True, None), "outputs are normalised"),
        ("norm_before_gate", (False, None), "outputs are gated before they are normalised"),
        ("D_has_hdim", (False, None), "D is one value per head"),
        ("dt_limit", ((0.0, float("inf")), None), "time steps have no limit"),
        ("time_step_limit", ((0.0, float("inf")), None), "time steps have no limit"),
    ):
        fields.only(name, *known, why=why)
    # defaults are FLA's, because its configurations omit fields; transformers writes all fields
    width, head = fields.number("hidden_size", default=2048), fields.number("head_dim", default=64)
    expand = fields.get("expand", default=2)
    heads = fields.get("num_heads")
    if heads is not None and heads * head != int(expand * width):
        raise fields.refused(
            f"num_heads * head_dim must be expand * hidden_size, got {heads} * {head} and {expand} * {width}"
        )
    options = {
        "expand": float(expand), "head_dim": head, "state_size": fields.number("state_size", default=128),
        "num_groups": fields.number("n_groups", default=1), "conv_size": fields.number("conv_kernel", default=4),
    }  # fmt: skip
    config = common_config(
        fields, [MAMBA2] * fields.number("num_hidden_layers", default=48), {MAMBA2: options}, hidden_size=width,
        intermediate_size=0, norm_eps=fields.get("layer_norm_epsilon", "norm_eps", default=1e-5),
        tie_word_embeddings=fields.get("tie_word_embeddings", default=False),
    )  # fmt: skip
    return config, _mamba_names(config, "embeddings", conv_bias=fields.get("use_conv_bias", default=True))


def _read_state_spaces(fields: Fields) -> tuple[HybridConfig, Names]:
    own = Fields(fields.source, fields.get("ssm_cfg", default={}))
    own.only("layer", "Mamba1", "Mamba2", why="this layer is not supported")
    if own.get("layer", default="Mamba1") != "Mamba2":
        raise fields.refused("ssm_cfg: Mamba-1 layers are not supported; expected layer='Mamba2'")
    if fields.get("attn_layer_idx"):
        raise fields.refused("attn_layer_idx: layers of attention are not converted")
    fields.only("rms_norm", True, why="norms are RMS norms")
    for name, known, why in (
        ("bias", (False,), "projections have no biases"),
        ("rmsnorm", (True,), "outputs are normalised"),
        ("norm_before_gate", (False,), "outputs are gated before they are normalised"),
        ("D_has_hdim", (False,), "D is one value per head"),
        ("d_ssm", (None,), "all channels go through the state"),
        ("dt_limit", ((0.0, float("inf")),), "time steps have no limit"),
    ):
        own.only(name, *known, why=why)
    if fields.get("d_intermediate", default=0):
        raise fields.refused("d_intermediate: layers with an MLP are not converted")
    options = {
        "expand": float(own.get("expand", default=2)), "head_dim": own.number("headdim", default=64),
        "state_size": own.number("d_state", default=128), "num_groups": own.number("ngroups", default=1),
        "conv_size": own.number("d_conv", default=4),
    }  # fmt: skip
    multiple = fields.number("pad_vocab_size_multiple", default=8)
    config = common_config(
        fields, [MAMBA2] * fields.number("n_layer"), {MAMBA2: options}, hidden_size=fields.number("d_model"),
        intermediate_size=0, norm_eps=1e-5, tie_word_embeddings=fields.get("tie_embeddings", default=True),
        vocab_size=-(-fields.number("vocab_size") // multiple) * multiple,
    )  # fmt: skip
    return config, _mamba_names(config, "embedding", conv_bias=own.get("conv_bias", default=True))


def _write_common(config: HybridConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"FLA's attention has no scaled rotary positions, got {rope}")
    if not config.intermediate_size:
        raise ValueError("FLA's layers have an MLP each, got intermediate_size=0")
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers, "intermediate_size": config.intermediate_size,
        "hidden_act": "swish", "norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range, "max_position_embeddings": config.max_position_embeddings,
        "pad_token_id": config.pad_token_id, "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id,
        "use_cache": config.use_cache,
    }  # fmt: skip


def _write_attention(config: HybridConfig, layer: int) -> tuple[dict[str, Any], Names]:
    """Return the fields of FLA's config for an attention layer, and FLA's names of its weights."""
    given = {
        "num_heads": 16, "num_kv_heads": None, "head_dim": None, "window": None, "sinks": 0, "rope": True,
        "qk_norm": False, "qkv_bias": False, "qk_norm_eps": None, "impl": None,
    } | config.options_of(layer)  # fmt: skip
    heads = given["num_heads"]
    if given["head_dim"] not in (None, config.hidden_size // heads) or config.hidden_size % heads:
        raise ValueError(f"FLA's heads share the model's width: expected head_dim={config.hidden_size / heads:g}")
    if given["sinks"] or not given["rope"]:
        raise ValueError("FLA's attention has rotary positions and no sinks")
    eps = config.norm_eps if given["qk_norm_eps"] is None else given["qk_norm_eps"]
    if given["qk_norm"] and eps != _QK_NORM_EPS:
        raise ValueError(f"FLA's norms of q and k have eps {_QK_NORM_EPS}, got {eps}")
    fields = {
        "num_heads": heads, "num_kv_heads": given["num_kv_heads"] or heads, "qkv_bias": given["qkv_bias"],
        "window_size": given["window"], "rope_theta": (config.rope_parameters or {}).get("rope_theta", 10000.0),
    }  # fmt: skip
    return fields | {"qk_norm": given["qk_norm"]}, attention_names(qkv_bias=given["qkv_bias"], qk_norm=given["qk_norm"])


def _write_transformer(config: HybridConfig) -> tuple[dict[str, Any], Names]:
    written = [_write_attention(config, i) for i in range(config.num_hidden_layers)]
    if any(fields != written[0][0] for fields, _ in written):
        raise ValueError("FLA's Transformer has equal layers")
    values = {"model_type": "transformer", "architectures": ["TransformerForCausalLM"], **written[0][0]}
    return values | _write_common(config), fla_names(config, [names for _, names in written])


def _write_delta(config: HybridConfig) -> tuple[dict[str, Any], Names]:
    names, specs, delta = [], {}, None
    for i, label in enumerate(config.labels):
        kind = config.mixer_type(i)
        if kind == ATTENTION:
            fields, own = _write_attention(config, i)
            if fields.pop("qk_norm"):
                raise ValueError("FLA's attention beside Gated DeltaNet has no norms of q and k")
            specs.setdefault(label, {"layers": [], **fields})["layers"].append(i)
        elif kind == DELTA:
            options = {
                "num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0, "conv_size": 4,
                "allow_neg_eigval": False, "output_gate": True,
            } | {n: value for n, value in config.options_of(i).items() if n != "impl"}  # fmt: skip
            if delta not in (None, options):
                raise ValueError("FLA's layers of Gated DeltaNet are equal")
            delta, own = options, delta_names(output_gate=options["output_gate"])
        else:
            raise ValueError(f"FLA's Gated DeltaNet has layers of it and of attention, got {label!r}")
        names.append(own)
    if delta is None:
        raise ValueError("FLA's Gated DeltaNet has at least one layer of it; its Transformer is of attention alone")
    values = {
        "model_type": "gated_deltanet", "architectures": ["GatedDeltaNetForCausalLM"], "attn_mode": "chunk",
        "use_short_conv": True, "use_gate": delta.pop("output_gate"), "output_gate_activation": "swish",
        "attn": list(specs.values()) or None, **delta,
    }  # fmt: skip
    return values | _write_common(config), fla_names(config, names)


def _is(kind: str) -> Any:
    return lambda fields: fields.get("model_type") == kind


TRANSFORMER = Layout(
    "FLA's Transformer", _is("transformer"), _read_transformer, _write_transformer, ignored=("rotary.inv_freq",)
)
GATED_DELTANET = Layout(
    "FLA's Gated DeltaNet", _is("gated_deltanet"), _read_delta, _write_delta, ignored=("rotary.inv_freq",)
)
LAYOUTS = (
    TRANSFORMER,
    GATED_DELTANET,
    Layout("FLA's or transformers' Mamba-2", _is("mamba2"), _read_mamba2),
    Layout("state-spaces' Mamba-2", lambda fields: {"d_model", "n_layer"} <= set(fields.values), _read_state_spaces),
)


def fla_layout(config: HybridConfig) -> Layout:
    """Return the layout of FLA to which a model with this configuration can be exported."""
    alone = all(config.mixer_type(i) == ATTENTION for i in range(config.num_hidden_layers))
    return TRANSFORMER if alone else GATED_DELTANET
