"""Converting FLA's GLA and GSA models: contract of the GSA layer, equal logits, refusals."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.fla_models import fla_folder, fla_logits
from tokenmix_core.integrations.checkpoints import load_third_party
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.mixers import MixerContract
from tokenmix_nha.cli import main
from tokenmix_nha.gsa import GatedSlotAttention
from tokenmix_nha.layouts import LAYOUTS

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "norm_eps": 1e-6,
    "hidden_act": "swish", "tie_word_embeddings": True, "use_short_conv": False,
}  # fmt: skip
GLA = SIZES | {"model_type": "gla", "num_heads": 2, "expand_k": 0.5, "expand_v": 1, "use_output_gate": True}
GSA = SIZES | {
    "model_type": "gsa", "num_heads": 4, "num_kv_heads": 2, "num_slots": 5, "gate_logit_normalizer": 4,
    "feature_map": "swish", "expand_k": 1, "expand_v": 1,
}  # fmt: skip
ATTENDING = [{"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 100.0}]
KINDS = {"gla": GLA, "gsa": GSA, "gla with attention": GLA | {"attn": ATTENDING}}


class TestGatedSlotAttention(MixerContract):
    cases: ClassVar = {
        "gsa": lambda: GatedSlotAttention(32, num_heads=4, slots=5),
        "groups": lambda: GatedSlotAttention(32, num_heads=4, num_kv_heads=2, slots=3, gate_normalizer=2.0),
    }


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_converted_models_have_the_logits_of_fla_s(kind, tmp_path, capsys):
    weights = fla_folder(tmp_path / "theirs", KINDS[kind])
    assert main(["convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 0
    assert "FLA's" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = torch.randint(3, 61, (2, 19), generator=torch.Generator().manual_seed(0))
    assert relative_error(model(ids).logits, fla_logits(KINDS[kind], weights, ids)) < 1e-5


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (GLA, {"use_short_conv": True}, "not convolved"),
        (GLA, {"num_kv_heads": 1}, "its own keys and values"),
        (GLA, {"use_output_gate": False}, "outputs are gated"),
        (GSA, {"feature_map": "relu"}, "pass through a SiLU"),
        (GSA, {"expand_k": 0.5}, "share the model's width"),
        (GSA, {"num_slots": 7}, "misshapen"),
        (GSA, {"model_type": "rwkv7"}, "model_type 'rwkv7' is of no layout"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(config, change, reason, tmp_path):
    fla_folder(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=reason):
        load_third_party(tmp_path, LAYOUTS)


@pytest.mark.parametrize("sizes", [{"num_heads": 3}, {"num_heads": 4, "num_kv_heads": 3}, {"slots": 0}])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match="GatedSlotAttention"):
        GatedSlotAttention(32, **sizes)
