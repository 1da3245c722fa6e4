"""Test our models in vLLM: tokens equal those of `generate`. `nox -s vllm` runs these tests if vLLM installs."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s vllm")

from served_by_vllm import check_served, engine, generated_tokens, prompts_of, served_tokens
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

ATTENTION = {"num_heads": 4, "head_dim": 64}
OPTIONS = {
    "attention": ATTENTION,
    "window": {**ATTENTION, "type": "attention", "window": 20, "qk_norm": True, "num_kv_heads": 4},
    "sinks": {**ATTENTION, "type": "attention", "window": 20, "sinks": 4},
    "gated_delta_net": {"num_heads": 1, "head_dim": 16, "num_v_heads": 2},
    "mamba2": {"head_dim": 32, "state_size": 16},
}


def tiny(*labels: str) -> HybridForCausalLM:
    torch.manual_seed(0)
    options = {label: OPTIONS[label] for label in dict.fromkeys(labels)}
    sizes = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": len(labels), "intermediate_size": 96}
    return HybridForCausalLM(
        HybridConfig(**sizes, mixers=list(labels), mixer_options=options, initializer_range=0.3, eos_token_id=0)
    )


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    "labels", [("gated_delta_net", "attention"), ("mamba2", "window", "gated_delta_net", "attention")], ids="-".join
)
def test_hybrids(labels, prefix_caching, tmp_path):
    check_served(tiny(*labels), tmp_path, prefix_caching=prefix_caching)


@pytest.mark.parametrize("labels", [("gated_delta_net",), ("attention", "window"), ("sinks",)], ids="-".join)
def test_one_kind_of_layer(labels, tmp_path):
    check_served(tiny(*labels), tmp_path)


@pytest.mark.parametrize(("caching", "groups"), [(False, 2), (True, 4)])
def test_states_of_several_layers_share_slots(caching, groups, tmp_path):
    labels = ("gated_delta_net", "mamba2", "attention", "gated_delta_net")
    model = tiny(*labels).eval()
    model.save_pretrained(tmp_path)
    prompts = prompts_of(199)
    options = {"enable_prefix_caching": caching, "max_num_batched_tokens": 128}
    with engine(tmp_path, dtype="float32", **options) as llm:
        assert served_tokens(llm, prompts)[0] == generated_tokens(model, prompts)
        manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        assert len(manager.kv_cache_config.kv_cache_groups) == groups


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path):
    tiny("gated_delta_net").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 112}))
    with (
        pytest.raises(ValueError, match=r"the checkpoint's tensor model\.layers\.0\.mlp\..* is of shape"),
        engine(tmp_path),
    ):
        pass
