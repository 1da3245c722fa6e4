"""The checkpoint layout of the authors' code, github.com/automl/NeuralAttentionSearchLinear, commit 90b4315."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.integrations import Fields, Layout, Names, delta_names, fla_config, fla_names
from tokenmix_core.modeling import HybridConfig, own_fields
from tokenmix_nats_l.config import NatsLConfig

MODEL_TYPE = "neural_attention_search_linear_attn_gdn"
# for each value of the authors' option `ops_for_incomplete_chunks`, our option `own_chunk`
_OWN_CHUNK = {"all": "both", "attn": "softmax", "gated_delta_net": "linear"}


def _read(fields: Fields) -> tuple[HybridConfig, Names]:
    heads = fields.number("num_heads", default=6)
    for name, known, why in (
        ("n_ops", (2,), "a layer has two operations"),
        ("num_v_heads", (None, heads), "every head has its own values"),
        ("num_nats_head", (None, heads), "every head has its own types"),
        ("nats_block_agg_type", ("mean",), "scores are those of mean inputs"),
        ("nats_sample_strategy", ("argmax",), "types have the higher score"),
        ("attn_qk_norm", (False, True), "q and k of softmax heads are normalised"),
        ("attn_with_short_conv", (False, True), "softmax heads have the convolved q, k and v"),
        ("outputs_are_wighted", (True,), "the operations' outputs are weighted"),
        ("incomplete_block_start_with_ht", (True,), "a token sees the state at its chunk's start"),
        ("use_gate", (True,), "outputs are gated"),
        ("use_short_conv", (True,), "q, k and v are convolved"),
        ("conv_bias", (False,), "convolutions have no biases"),
        ("allow_neg_eigval", (False,), "β is below 1"),
        ("attn", (None,), "layers are NAtS-L or Gated DeltaNet"),
    ):
        fields.only(name, *known, why=why)
    for name in ("attn_qk_norm", "attn_with_short_conv"):
        if not fields.get(name, default=False):
            raise fields.refused(f"{name}=False cannot be converted: NAtS-L layers have it")
    own_chunk = fields.get("ops_for_incomplete_chunks", default="all")
    if own_chunk not in _OWN_CHUNK:
        raise fields.refused(f"ops_for_incomplete_chunks must be one of {', '.join(_OWN_CHUNK)}, got {own_chunk!r}")
    shared = {
        "num_heads": heads, "head_dim": fields.number("head_dim", default=256),
        "expand_v": float(fields.get("expand_v", default=2.0)), "conv_size": fields.number("conv_size", default=4),
    }  # fmt: skip
    layers, delta = fields.number("num_hidden_layers", default=21), fields.get("gdn_layers", default=[])
    mixers = ["gated_delta_net" if i in delta else "nats_l" for i in range(layers)]
    options = {"gated_delta_net": shared} if "gated_delta_net" in mixers else {}
    if "nats_l" in mixers:
        options["nats_l"] = shared | {
            "num_softmax_heads": fields.number("num_attn_heads", default=12),
            "chunk": fields.number("nats_block_size", default=64), "own_chunk": _OWN_CHUNK[own_chunk],
            "rope": fields.get("attn_apply_pos_encoding", default=True),
            "decay": fields.get("decay_for_non_gdn_blocks", default=False),
        }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": float(fields.get("attn_rope_theta", default=10000.0))}
    values = own_fields(fla_config(fields, mixers, options, rope_parameters=rope))
    config = NatsLConfig(**values, mixers=mixers, mixer_options=options)
    common = delta_names(output_gate=True)
    own = {name: theirs for name, theirs in common.items() if name != "o_norm.weight"}
    own |= {"score_proj.weight": "nats_layer.weight", "weight_proj.weight": "nats_out_weights_layer.weight"}
    own |= {"linear_norm.weight": "o_norm.weight1", "softmax_norm.weight": "o_norm.weight2"}
    own |= {f"{part}_norm.weight": f"{part}_norm.weight" for part in "qk"}
    return config, fla_names(config, [common if mixer == "gated_delta_net" else own for mixer in mixers])


def _reordered(name: str, x: Tensor) -> Tensor:
    """Return a weight with its rows in this package's order: the linear rows of all heads, then the softmax rows."""
    if name.endswith((".score_proj.weight", ".weight_proj.weight")):
        # the authors order rows by head; within a head, scores begin with softmax rows, output weights with linear rows
        by_operation = x.unflatten(0, (-1, 2)).transpose(0, 1)
        return (by_operation.flip(0) if "score_proj" in name else by_operation).flatten(0, 1).contiguous()
    return x


LAYOUTS = (
    Layout(
        "the authors' NAtS-L", lambda fields: fields.get("model_type") == MODEL_TYPE, _read,
        ignored=("rotary.inv_freq",), reordered=_reordered,
    ),
)  # fmt: skip
