"""Test that transformers' `attn_implementation` selects among our implementations of attention."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.closeness import relative_error

SIZES = {"vocab_size": 59, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
GDN = {"gated_delta_net": {"num_heads": 1, "head_dim": 16}}
MIXED = {"mixers": ["gated_delta_net", "attention"], "mixer_options": {**GDN, "attention": {"num_heads": 2}}}


@pytest.mark.parametrize(
    ("requested", "impl"),
    [(None, None), ("eager", "reference"), ("sdpa", "sdpa"), ("flash_attention_2", "flash_attn")],
)
def test_request_sets_attention_mixers_only(requested, impl, tmp_path):
    HybridForCausalLM(HybridConfig(**SIZES, **MIXED)).save_pretrained(tmp_path)
    for model in (
        HybridForCausalLM.from_pretrained(tmp_path, attn_implementation=requested),
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=requested),
        AutoModelForCausalLM.from_config(HybridConfig(**SIZES, **MIXED), attn_implementation=requested),
    ):
        assert [mixer.impl for mixer in model.model.mixers] == [None, impl]
    model = HybridForCausalLM.from_pretrained(tmp_path)
    model.set_attn_implementation(requested)
    assert [mixer.impl for mixer in model.model.mixers] == [None, impl]


@torch.no_grad()
def test_eager_and_sdpa_equal_the_default():
    model, ids = HybridForCausalLM(HybridConfig(**SIZES, **MIXED)).eval(), torch.randint(0, 59, (2, 9))
    exact = model(ids).logits
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert relative_error(model(ids).logits, exact) < 1e-5
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)


@pytest.mark.parametrize(
    ("fields", "requested", "said"),
    [
        (MIXED, "flex_attention", "must be None or one of 'eager', 'sdpa', 'flash_attention_2' .*got 'flex_attention'"),
        (MIXED, "paged|eager", r"got 'paged\|eager'"),
        (MIXED, {"": "sdpa"}, "got {'': 'sdpa'}"),
        (
            {"mixers": ["gated_delta_net"], "mixer_options": GDN},
            "sdpa",
            "'sdpa' has no effect: no layer of the model has attention",
        ),
    ],
)
def test_unsupported_implementation_raises(fields, requested, said):
    model = HybridForCausalLM(HybridConfig(**SIZES, **fields))
    with pytest.raises(ValueError, match=said):
        model.set_attn_implementation(requested)
    if isinstance(requested, str):
        with pytest.raises(ValueError, match=said):
            AutoModelForCausalLM.from_config(HybridConfig(**SIZES, **fields), attn_implementation=requested)
