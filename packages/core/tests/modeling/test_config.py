"""Test that configurations can be saved and loaded again, and that invalid ones raise errors."""

import json

import pytest
import torch
from transformers import AutoConfig

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, Mixer, find_mixer, known_mixers, register_mixer
from tokenmix_core.nn.attention import Attention


def test_mixer_pattern_is_repeated():
    config = HybridConfig(num_hidden_layers=6, mixers=["gated_delta_net", "gated_delta_net", "attention"])
    assert config.mixers == ["gated_delta_net", "gated_delta_net", "attention"] * 2
    assert HybridConfig(num_hidden_layers=3).mixers == ["attention"] * 3


def test_a_label_names_a_type_and_its_options():
    options = {"near": {"type": "attention", "window": 8}, "attention": {"num_heads": 4}}
    config = HybridConfig(num_hidden_layers=2, mixers=["near", "attention"], mixer_options=options)
    assert [config.mixer_type(i) for i in (0, 1)] == ["attention", "attention"]
    assert [config.options_of(i) for i in (0, 1)] == [{"window": 8}, {"num_heads": 4}]
    options["near"]["window"] = 9
    assert config.options_of(0) == {"window": 8}


def test_configuration_round_trips_through_json(tmp_path):
    config = HybridConfig(
        num_hidden_layers=2,
        mixers=["mamba2", "attention"],
        mixer_options={"mamba2": {"state_size": 64}},
        rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
        eos_token_id=[3, 4],
    )
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is HybridConfig
    assert {**again.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "tokenmix_hybrid"


def test_rope_theta_without_rope_parameters():
    assert HybridConfig(rope_theta=5e5).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizes": 64}, "unknown key 'hidden_sizes'"),
        ({"temperature": 0.7}, "unknown key 'temperature'"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"hidden_size": 64.5}, "hidden_size must be an integer, got 64.5"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1, got -1"),
        ({"intermediate_size": -1}, "intermediate_size must be at least 0, got -1"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"loss_impl": "fused"}, "loss_impl must be one of .*'liger'.*got 'fused'"),
        ({"mixers": []}, "got 0 labels"),
        ({"mixers": ["attention"] * 5}, "12 layers, or a pattern whose length divides them, got 5 labels"),
        ({"mixers": ["atention"]}, "unknown mixer type 'atention'; known are attention"),
        ({"mixers": ["a"], "mixer_options": {"a": {"type": "b"}}}, "unknown mixer type 'b'"),
        ({"mixer_options": {"mamba2": {}}}, "no layer has the label 'mamba2'"),
        ({"mixer_options": {"attention": {"num_head": 4}}}, r"unknown option 'num_head'; Attention has num_heads"),
        ({"mixer_options": {"attention": {"norm_eps": 1e-5}}}, "unknown option 'norm_eps'"),
        ({"eos_token_id": 50257}, "eos_token_id must lie in the vocabulary of 50257, got 50257"),
        ({"pad_token_id": -1}, "pad_token_id must lie in the vocabulary"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type must be one of default"),
    ],
)
def test_invalid_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        HybridConfig(**fields)


def test_other_model_type_raises():
    with pytest.raises(ValueError, match="model_type 'tokenmix_hybrid', got 'llama'"):
        HybridConfig.from_dict({"model_type": "llama", "vocab_size": 10})


def test_mixers_are_registered_once():
    assert {"attention", "gated_delta_net", "mamba2"} <= set(known_mixers())
    register_mixer("attention", Attention)
    assert find_mixer("attention") is Attention
    with pytest.raises(ValueError, match="'attention' is already Attention"):
        register_mixer("attention", type("Other", (Mixer,), {}))
    with pytest.raises(ValueError, match="expected a subclass of Mixer"):
        register_mixer("other", dict)


def test_layer_types_are_those_of_transformers_and_are_not_saved(tmp_path):
    config = HybridConfig(
        num_hidden_layers=4,
        mixers=["attention", "near", "gated_delta_net", "mamba2"],
        mixer_options={"near": {"type": "attention", "window": 8}},
    )
    assert config.layer_types == ["full_attention", "sliding_attention", "linear_attention", "linear_attention"]
    config.validate()
    config.save_pretrained(tmp_path)
    assert "layer_types" not in (tmp_path / "config.json").read_text()
    assert HybridConfig.from_pretrained(tmp_path).layer_types == config.layer_types


@pytest.mark.parametrize("mixer", ["gated_delta_net", "mamba2"])
def test_accelerate_refuses_to_shard_recurrences_over_the_sequence(mixer):
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 0, "num_hidden_layers": 2}
    with torch.device("meta"):
        recurrent, full = (HybridForCausalLM(HybridConfig(**sizes, mixers=[x])) for x in (mixer, "attention"))
    for name in ("_refuse_recurrent_layers_under_sequence_parallelism", "_attach_context_parallel_hooks"):
        guard = getattr(big_modeling, name, None)
        if guard is None:
            pytest.skip("this version of accelerate has no such guard")
        guard(full)
        with pytest.raises(ValueError, match="linear_attention"):
            guard(recurrent)
