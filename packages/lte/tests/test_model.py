"""The model family: contracts of every family, and auxiliary outputs of its layers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from support.exporting import check_exports
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import ModelContract
from tokenmix_lte.config import LteConfig
from tokenmix_lte.model import LteForCausalLM, LteModel

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
# no dropout, so that two calls have equal gradients
OPTIONS = {"num_heads": 4, "num_kv_heads": 2, "window": 13, "cap": 4, "sinks": 2, "dropout": 0.0}
NSA = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "block": 4, "blocks": 3, "window": 6}


class TestLteModel(ModelContract):
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "pure": {**SIZES, "mixer_options": {"lte": OPTIONS}},
        "hybrid": {
            **SIZES,
            "mixers": ["gated_delta_net", "lte"],
            "mixer_options": {"lte": OPTIONS, "gated_delta_net": {"num_heads": 2, "head_dim": 8}},
        },
        "native sparse attention": {
            **SIZES,
            "mixers": ["gated_delta_net", "nsa"],
            "mixer_options": {"nsa": NSA, "gated_delta_net": {"num_heads": 2, "head_dim": 8}},
        },
    }
    traced: ClassVar[dict[str, dict[str, Any]]] = {"pure": configs["pure"] | {"num_hidden_layers": 1}}
    config_class = LteConfig
    model_class = LteModel
    causal_lm_class = LteForCausalLM
    # enough tokens to evict some
    tokens = 40


@pytest.mark.parametrize("name", TestLteModel.configs)
def test_one_exported_program_takes_any_length(name):
    torch.manual_seed(0)
    check_exports(LteForCausalLM(LteConfig(**TestLteModel.configs[name])))


def test_layers_know_the_number_of_lte_layers():
    mixers = {"mixers": ["lte", "attention", "lte"], "mixer_options": {"lte": OPTIONS, "attention": {"num_heads": 2}}}
    model = LteForCausalLM(LteConfig(**{**SIZES, "num_hidden_layers": 3, **mixers}))
    assert [getattr(mixer, "num_lte_layers", None) for mixer in model.model.mixers] == [2, None, 2]
    out = model.train()(torch.randint(0, 61, (2, 30)))
    assert out.auxiliary["kept_share"].shape == (2, 2)
    assert out.auxiliary["sparsity_loss"].shape == (2,)
    out = model.eval()(torch.randint(0, 61, (2, 30)), use_cache=False)
    assert out.auxiliary["held_share"].shape == (2, 2)


@torch.no_grad()
def test_padded_prompts_compile_with_a_cache_and_without():
    torch.manual_seed(0)
    model = LteForCausalLM(LteConfig(**TestLteModel.configs["pure"])).eval()
    ids = torch.randint(0, 61, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    compiled = torch.compile(model, backend="eager")
    for use_cache in (False, True):
        exact = model(ids, attention_mask=mask, use_cache=use_cache).logits
        got = compiled(ids, attention_mask=mask, use_cache=use_cache).logits
        assert relative_error(got[0], exact[0]) < 1e-5
        assert relative_error(got[1, 20:], exact[1, 20:]) < 1e-5
