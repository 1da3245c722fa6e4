"""Make random models of transformers' hybrid families, small ones for tests and larger ones for benchmarks."""

from __future__ import annotations

import importlib
from typing import Any

import torch

# for each family, the names of its configuration class and of its language model class
_CLASSES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM"),
    "bamba": ("BambaConfig", "BambaForCausalLM"),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM"),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM"),
    "lara_mini": ("LaraMiniConfig", "LaraMiniForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM"),
}
DELTA_RULE = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp", "lara_mini")


def field_config(
    family: str, *, width: int = 32, head: int = 8, state: int = 8, layers: int = 2, vocab: int = 64, groups: int = 2,
    chunk: int = 16,
) -> Any:  # fmt: skip
    """Return a family's configuration in which only the last layer has attention, if the family permits this.

    Args:
        family: a key of `tokenmix_core.integrations.transformers.FAMILIES`.
        width: width of the model.
        head: size of the heads of attention and of values.
        state: size of the heads of keys, which is SSD's state size.
        layers: number of layers.
        vocab: size of the vocabulary.
        groups: number of groups of SSD's heads; the heads of a group share B and C.
        chunk: number of tokens of a chunk of SSD in transformers' own scans.
    """
    attention = {"num_attention_heads": width // head, "num_key_value_heads": width // head // 2, "head_dim": head}
    common = {
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    mlp = {"intermediate_size": 2 * width}
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }  # fmt: skip
    kinds = ["linear_attention"] * (layers - 1) + ["full_attention"]
    delta = {
        "linear_num_key_heads": width // head // 2, "linear_num_value_heads": width // head,
        "linear_key_head_dim": state, "linear_value_head_dim": head, "layer_types": kinds,
    }  # fmt: skip
    bamba = {
        "mamba_n_heads": 2 * width // head, "mamba_d_head": head, "mamba_n_groups": groups, "mamba_d_state": state,
        "mamba_chunk_size": chunk,
    }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "qwen3_next": {**attention, **mlp, **delta, **experts},
        "qwen3_5": {**attention, **mlp, **delta},
        "qwen3_5_moe": {**attention, **delta, **experts},
        "olmo_hybrid": {**attention, **mlp, **delta},
        "mamba2": {
            "num_heads": 2 * width // head, "head_dim": head, "state_size": state, "n_groups": groups,
            "chunk_size": chunk,
        },
        "bamba": {**attention, **mlp, **bamba, "attn_layer_indices": [layers - 1]},
        "zamba2": {
            **mlp, "mamba_d_state": state, "mamba_ngroups": groups, "n_mamba_heads": 2 * width // head,
            "chunk_size": chunk, "num_attention_heads": width // head, "adapter_rank": 4,
            "layers_block_type": ["mamba"] * (layers - 1) + ["hybrid"],
        },
        "nemotron_h": {
            **attention, **mlp, "layers_block_type": ["mamba"] * (layers - 1) + ["attention"], "ssm_state_size": state,
            "mamba_num_heads": 2 * width // head, "mamba_head_dim": head, "n_groups": groups, "chunk_size": chunk,
        },
        "granitemoehybrid": {
            **attention, **mlp, **bamba, "layer_types": ["mamba"] * (layers - 1) + ["attention"],
            "num_local_experts": 4, "shared_intermediate_size": width,
        },
        "qwen4_exp": {
            **attention, **delta, **experts, "layer_types": [*kinds[:-1], "indexed_attention"], "indexer_n_heads": 2,
            "indexer_kv_heads": 1, "indexer_head_dim": head, "indexer_budget": 64, "indexer_compress_ratio": 4,
            "hc_count": 2, "hc_lowrank": 8,
        },
        # select all experts: rounding to bfloat16 would otherwise select other ones
        "lara_mini": {**attention, **delta, **experts, "num_experts_per_tok": 4},
        "lfm2": {**attention, **mlp, "layer_types": ["conv"] * (layers - 1) + kinds[-1:]},
        "lfm2_moe": {
            **attention, **mlp, "layer_types": ["conv"] * (layers - 1) + kinds[-1:], "num_dense_layers": 1,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width,
        },
        "lfm3": {**attention, **mlp, "layer_types": ["conv"] * (layers - 1) + kinds[-1:]},
        "falcon_h1": {**attention, **mlp, **bamba, "mamba_d_ssm": 2 * width, "mamba_rms_norm": False},
    }  # fmt: skip
    if family in ("nemotron_h",):
        common.pop("num_hidden_layers")
    if family in ("bamba", "granitemoehybrid", "olmo_hybrid", "lfm2", "lfm2_moe"):
        own[family].pop("head_dim")
    home = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    return getattr(home, _CLASSES[family][0])(**common, **own[family])


def field_model(family: str, *, seed: int = 0, device: str = "cpu", **sizes: int) -> torch.nn.Module:
    """Return a random language model of a family, in evaluation mode; `sizes` are arguments of `field_config`."""
    torch.manual_seed(seed)
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    # make it on its device, because a CPU takes many seconds for large models
    with torch.device(device):
        model = getattr(home, _CLASSES[family][1])(field_config(family, **sizes)).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # draw values far from the initial ones, so that no terms cancel and every path has an effect
            if name.endswith(("conv1d.weight", "conv1d.bias", "conv.conv.weight", "dt_bias")):
                parameter.uniform_(-0.5, 0.5, generator=generator)
            elif parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model
