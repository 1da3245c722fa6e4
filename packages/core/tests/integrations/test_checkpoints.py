"""Test that converted model folders give equal logits, and that exported ones can be read again."""

from __future__ import annotations

import inspect
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from hf_models import field_model
from support.fla_models import fla_folder, fla_logits
from tokenmix_core.cli.app import main
from tokenmix_core.integrations.checkpoints import convert_folder, export, load_third_party
from tokenmix_core.integrations.layouts import LAYOUTS, fla_layout
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.closeness import relative_error

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "norm_eps": 1e-6,
    "hidden_act": "swish", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "fuse_norm": True, "use_cache": True, "max_position_embeddings": 128,
}  # fmt: skip
TRANSFORMER = SIZES | {
    "model_type": "transformer", "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "qk_norm": True,
    "window_size": 7, "rope_theta": 500.0, "elementwise_affine": True,
}  # fmt: skip
DELTA = SIZES | {
    "model_type": "gated_deltanet", "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5, "use_gate": True,
    "use_short_conv": True, "conv_size": 4, "allow_neg_eigval": True, "output_gate_activation": "swish", "attn": None,
    "attn_mode": "chunk",
}  # fmt: skip
ATTENDING = [
    {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 5, "rope_theta": 100.0},
    {"layers": [2], "num_heads": 2, "num_kv_heads": 2, "qkv_bias": False, "window_size": None, "rope_theta": 100.0},
]
FLA = {
    "transformer": TRANSFORMER,
    "transformer, tied": TRANSFORMER | {"qk_norm": False, "tie_word_embeddings": True, "window_size": None},
    "gated_deltanet": DELTA,
    "gated_deltanet without gates": DELTA | {"use_gate": False, "num_v_heads": None, "allow_neg_eigval": False},
    "gated_deltanet with attention": DELTA | {"attn": ATTENDING},
}


def ids(rows=2, tokens=19, words=61):
    return torch.randint(3, words, (rows, tokens), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("kind", FLA)
def test_fla_models_have_equal_logits_and_round_trip(kind, tmp_path):
    config = FLA[kind]
    weights = fla_folder(tmp_path / "theirs", config)
    model = load_third_party(tmp_path / "theirs", LAYOUTS)
    assert relative_error(model(ids()).logits, fla_logits(config, weights, ids())) < 1e-5
    export(model, fla_layout(model.config), tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {n: v for n, v in written.items() if n in config} == {
        n: v if (n, v) != ("num_v_heads", None) else 2
        for n, v in config.items()
        if n not in ("fuse_norm", "elementwise_affine")
    }


theirs_is_right = pytest.mark.skipif(
    "group_size" not in inspect.signature(MambaRMSNormGated).parameters,
    reason="before 5.23 transformers' Mamba-2 is normed over all groups at once, as that of mamba_ssm is not",
)


@theirs_is_right
@torch.no_grad()
def test_transformers_mamba2_has_equal_logits_also_sharded_in_bfloat16(tmp_path):
    theirs = field_model("mamba2", layers=3)
    expected = theirs(ids(words=64)).logits
    theirs.save_pretrained(tmp_path / "whole")
    assert relative_error(load_third_party(tmp_path / "whole", LAYOUTS)(ids(words=64)).logits, expected) < 1e-5
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    assert relative_error(load_third_party(tmp_path / "parts", LAYOUTS)(ids(words=64)).logits, expected) < 1e-5
    narrow = load_third_party(tmp_path / "whole", LAYOUTS, "bfloat16")
    assert narrow.lm_head.weight.dtype == torch.bfloat16
    assert narrow.model.layers[0].mixer.A_log.dtype == torch.float32


def state_spaces_folder(path, model, **fields):
    """Save the same weights in the layout of the repository state-spaces."""
    names = {name.replace("embeddings", "embedding"): x for name, x in model.state_dict().items()}
    path.mkdir()
    torch.save({name: x.clone() for name, x in names.items()}, path / "pytorch_model.bin")
    c = model.config
    own = {"layer": "Mamba2", "headdim": c.head_dim, "d_state": c.state_size, "ngroups": c.n_groups}
    values = {
        "d_model": c.hidden_size, "d_intermediate": 0, "n_layer": c.num_hidden_layers, "vocab_size": c.vocab_size - 5,
        "ssm_cfg": own, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(values | fields))


@theirs_is_right
@torch.no_grad()
def test_state_spaces_mamba2_has_equal_logits(tmp_path):
    theirs = field_model("mamba2")
    expected = theirs(ids(words=64)).logits
    state_spaces_folder(tmp_path / "a", theirs)
    assert relative_error(load_third_party(tmp_path / "a", LAYOUTS)(ids(words=64)).logits, expected) < 1e-5
    state_spaces_folder(tmp_path / "b", theirs, tie_embeddings=True)
    with pytest.raises(ValueError, match=r"said to be tied, and lm_head\.weight differs"):
        load_third_party(tmp_path / "b", LAYOUTS)
    theirs.lm_head.weight.copy_(theirs.backbone.embeddings.weight)
    state_spaces_folder(tmp_path / "c", theirs, tie_embeddings=True)
    tied = load_third_party(tmp_path / "c", LAYOUTS)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert relative_error(tied(ids(words=64)).logits, theirs(ids(words=64)).logits) < 1e-5


@theirs_is_right
@torch.no_grad()
def test_missing_convolution_bias_is_zero(tmp_path):
    theirs = field_model("mamba2")
    for layer in theirs.backbone.layers:
        layer.mixer.conv1d.bias.zero_()
    expected = theirs(ids(words=64)).logits
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({n: x for n, x in load_file(path).items() if "conv1d.bias" not in n}, path)
    change(tmp_path, use_conv_bias=False)
    assert relative_error(load_third_party(tmp_path, LAYOUTS)(ids(words=64)).logits, expected) < 1e-5


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@torch.no_grad()
def test_command_converts_a_folder_with_tokenizer_and_back(tmp_path, capsys):
    weights = fla_folder(tmp_path / "theirs", DELTA | {"attn": ATTENDING})
    (tmp_path / "theirs" / "tokenizer_config.json").write_text("{}")
    assert main(["convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 0
    assert "FLA's Gated DeltaNet" in capsys.readouterr().out
    assert (tmp_path / "ours" / "tokenizer_config.json").is_file()
    model = HybridForCausalLM.from_pretrained(tmp_path / "ours")
    assert relative_error(model(ids()).logits, fla_logits(DELTA | {"attn": ATTENDING}, weights, ids())) < 1e-5
    assert main(["convert", str(tmp_path / "ours"), "--to", "fla", "--out", str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    assert main(["convert", str(tmp_path / "ours"), "--out", str(tmp_path / "back")]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change_in", "reason"),
    [
        ({"model_type": "rwkv7"}, "model_type 'rwkv7' is of no layout"),
        ({"use_short_conv": False}, "use_short_conv=False cannot be converted"),
        ({"output_gate_activation": "sigmoid"}, "gated by a SiLU"),
        ({"hidden_act": "relu"}, "SwiGLU"),
        ({"attnres_block_size": 2}, "residuals are added"),
        ({"num_heads": 0}, "num_heads must be a positive number"),
        ({"attn": {"layers": [7], "num_heads": 2}}, "no layer 7 among 3"),
        ({"attn": [ATTENDING[0], ATTENDING[1] | {"rope_theta": 5.0}]}, "one for all"),
        ({"attn": [[]]}, "must name layers and num_heads"),
        ({"num_hidden_layers": 4}, r"18 missing \(model\.layers\.3"),
        ({"num_hidden_layers": 2}, "unknown"),
        ({"intermediate_size": 40}, "misshapen"),
    ],
)
def test_unsupported_configurations_raise(change_in, reason, tmp_path):
    fla_folder(tmp_path, DELTA)
    change(tmp_path, **change_in)
    with pytest.raises(ValueError, match=reason):
        load_third_party(tmp_path, LAYOUTS)


def test_mamba1_hybrids_and_limits_raise(tmp_path):
    theirs = field_model("mamba2")
    for n, (fields, reason) in enumerate(
        (
            ({"ssm_cfg": {}}, "Mamba-1 layers"),
            ({"attn_layer_idx": [1]}, "layers of attention are not converted"),
            ({"d_intermediate": 64}, "with an MLP"),
            ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "one value per head"),
        )
    ):
        state_spaces_folder(tmp_path / str(n), theirs, **fields)
        with pytest.raises(ValueError, match=reason):
            load_third_party(tmp_path / str(n), LAYOUTS)
    theirs.save_pretrained(tmp_path / "limits")
    change(tmp_path / "limits", time_step_limit=[0.0, 1.0])
    with pytest.raises(ValueError, match="time steps have no limit"):
        load_third_party(tmp_path / "limits", LAYOUTS)


def test_damaged_folders_raise(tmp_path):
    fla_folder(tmp_path / "good", DELTA)
    weights = load_file(tmp_path / "good" / "model.safetensors")

    def refused(reason, damage):
        folder = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", folder)
        damage(folder, folder / "model.safetensors")
        with pytest.raises(ValueError, match=reason):
            convert_folder(folder, tmp_path / "out", LAYOUTS)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(folder)

    index = {"weight_map": {name: "model-00001-of-00002.safetensors" for name in weights}}
    refused("expected a folder with config.json", lambda f, w: (f / "config.json").unlink())
    refused("is damaged", lambda f, w: (f / "config.json").write_text("{"))
    refused("must hold a dictionary", lambda f, w: (f / "config.json").write_text("[]"))
    refused("holds no weights", lambda f, w: w.unlink())
    refused("damaged or cut short", lambda f, w: w.write_bytes(w.read_bytes()[:-100]))
    refused("which is not there", lambda f, w: (f / f"{w.name}.index.json").write_text(json.dumps(index)))
    refused("index.json is damaged", lambda f, w: (f / f"{w.name}.index.json").write_text("{}"))
    name = "model.layers.1.attn.A_log"
    refused(rf"1 missing \({name}\)", lambda f, w: save_file({n: x for n, x in weights.items() if n != name}, w))
    refused("not finite", lambda f, w: save_file(weights | {name: weights[name] * torch.nan}, w))
    refused("1 unknown", lambda f, w: save_file(weights | {"model.extra": torch.ones(2)}, w))
    (tmp_path / "pickled").mkdir()
    shutil.copy(tmp_path / "good" / "config.json", tmp_path / "pickled")
    torch.save({"a": print}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="more than tensors"):
        load_third_party(tmp_path / "pickled", LAYOUTS)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mixers": ["mamba2"]}, "layers of it and of attention"),
        ({"mixers": ["attention"], "intermediate_size": 0}, "an MLP each"),
        ({"mixer_options": {"attention": {"head_dim": 16}}}, "share the model's width"),
        ({"mixer_options": {"attention": {"window": 4, "sinks": 1}}}, "no sinks"),
        ({"mixer_options": {"attention": {"qk_norm": True}}}, "eps 1e-05"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "no scaled rotary positions"),
        ({"mixers": ["attention", "b"], "mixer_options": {"b": {"type": "attention", "num_heads": 2}}}, "equal layers"),
    ],
)
def test_models_without_fla_counterpart_raise(fields, reason, tmp_path):
    sizes = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 16}
    config = HybridConfig(**sizes | fields)
    with pytest.raises(ValueError, match=reason):
        export(HybridForCausalLM(config), fla_layout(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()
