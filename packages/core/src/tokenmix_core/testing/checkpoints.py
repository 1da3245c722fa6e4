"""Tests of a model's configuration, initialisation and checkpoints."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, HybridModel


class CheckpointContract:
    """Part of `ModelContract`, which documents the attributes."""

    configs: ClassVar[dict[str, dict[str, Any]]]
    config_class: ClassVar[type[HybridConfig]]
    model_class: ClassVar[type[HybridModel]]
    causal_lm_class: ClassVar[type[HybridForCausalLM]]
    inputs: ClassVar[dict]

    def test_a_saved_model_comes_back_as_it_was(self, model, case, ids, tmp_path):
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        model.save_pretrained(tmp_path)
        assert type(AutoConfig.from_pretrained(tmp_path)) is self.config_class
        for name in self.configs[case]:
            assert getattr(AutoConfig.from_pretrained(tmp_path), name) == getattr(model.config, name), name
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(again) is self.causal_lm_class
        for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(p, q), name
        with torch.no_grad():
            logits = model(ids, use_cache=False, **self.inputs).logits
            assert torch.equal(again(ids, use_cache=False, **self.inputs).logits, logits)
        backbone = AutoModel.from_pretrained(tmp_path)
        assert type(backbone) is self.model_class

    def test_a_model_loaded_in_bfloat16_keeps_named_tensors_in_float32(self, model, tmp_path):
        model.save_pretrained(tmp_path)
        narrow = self.causal_lm_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for mixer, exact in zip(narrow.model.mixers, model.model.mixers, strict=True):
            for name in mixer.float32:
                assert torch.equal(getattr(mixer, name), getattr(exact, name)), name
        assert narrow.lm_head.weight.dtype == torch.bfloat16

    def test_tied_embeddings_follow_the_configuration(self, case):
        for tie in (True, False):
            fields: dict[str, Any] = {**self.configs[case], "tie_word_embeddings": tie}
            model = self.causal_lm_class(self.config_class(**fields))
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie

    def test_a_model_made_on_the_meta_device_starts_like_any_other(self, config):
        with torch.device("meta"):
            model = self.causal_lm_class(config)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for t in [*model.parameters(), *model.buffers()]:
                t.fill_(float("nan"))
        for module in model.modules():
            module.__dict__["_is_hf_initialized"] = False
        model.init_weights()
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            assert t.isfinite().all(), name

    def test_unknown_keys_and_damaged_or_other_checkpoints_are_refused(self, model, case, tmp_path):
        fields: dict[str, Any] = {**self.configs[case], "no_such_key": 1}
        with pytest.raises(ValueError, match="no_such_key"):
            self.config_class(**fields)
        model.save_pretrained(tmp_path)
        weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="damaged"):
            self.causal_lm_class.from_pretrained(tmp_path)
        weights.write_bytes(whole)
        content = json.loads(config.read_text())
        config.write_text(json.dumps(content | {"model_type": "llama"}))
        with pytest.raises(ValueError, match="'llama'"):
            self.causal_lm_class.from_pretrained(tmp_path)
        config.write_text(json.dumps(content | {"vocab_size": vocabulary(content) + 1}))
        with pytest.raises(ValueError, match="do not fit"):
            self.causal_lm_class.from_pretrained(tmp_path)


def vocabulary(content: dict) -> int:
    """Return the vocabulary size in a saved configuration; the default size if the configuration does not have it."""
    return content.get("vocab_size", HybridConfig.vocab_size)
