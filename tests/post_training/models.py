"""One tiny model per mixer."""

import importlib

import torch
import transformers

from tokenmix_core.data.tokenizer import byte_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": False}
HEADS = {"num_heads": 2, "head_dim": 16}
LTE = {"num_heads": 2, "window": 8, "cap": 4, "sinks": 1, "dropout": 0.0, "scorer": "mlp"}
NSA = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block": 4, "blocks": 3, "window": 8}
# by mixer: module, class prefix, options; window and cap are shorter than the texts
MODELS = {
    "attention": ("tokenmix_core.modeling", "Hybrid", {"num_heads": 2}),
    "gated_delta_net": ("tokenmix_core.modeling", "Hybrid", HEADS),
    "mamba2": ("tokenmix_core.modeling", "Hybrid", {"head_dim": 16}),
    "lte": ("tokenmix_lte", "Lte", LTE),
    "nats_l": ("tokenmix_nats_l", "NatsL", HEADS | {"num_softmax_heads": 2, "budget": 0.1}),
    "nha": ("tokenmix_nha", "Nha", {"num_heads": 2, "slots": 8, "window": 8}),
    "gated_slot_attention": ("tokenmix_nha", "Nha", {"num_heads": 2, "slots": 8}),
    "gla": ("tokenmix_nha", "Nha", {"num_heads": 2}),
    "nsa": ("tokenmix_lte", "Lte", NSA),
    "oryx": ("tokenmix_oryx", "Oryx", {"linear_mixer": "gated_delta_net", "num_heads": 2}),
}
# mixers whose layers add a loss of their own
AUXILIARY = ("lte", "nats_l")


def build(mixer: str, head: str = "CausalLM", **fields):
    """Build the tiny model of a mixer with equal weights in every call."""
    module, prefix, options = MODELS[mixer]
    package = importlib.import_module(module)
    tokenizer = byte_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    known = {"vocab_size": len(tokenizer), "mixers": [mixer], "mixer_options": {mixer: options}, **ids}
    config = getattr(package, f"{prefix}Config")(**SIZES | known | fields)
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{head}").from_config(config)
