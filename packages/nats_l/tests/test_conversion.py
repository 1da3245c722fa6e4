"""Conversion: new layers have the weights of trained ones, and checkpoints of the authors keep types and weights."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tokenmix_core.integrations import load_third_party
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_nats_l.cli import main
from tokenmix_nats_l.conversion import convert
from tokenmix_nats_l.layouts import LAYOUTS, MODEL_TYPE
from tokenmix_nats_l.model import NatsLForCausalLM

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48}
OPTIONS = {"gated_delta_net": {"num_heads": 2, "head_dim": 8}, "attention": {"num_heads": 4, "num_kv_heads": 2}}
IDS = torch.randint(61, (2, 150), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gdn():
    torch.manual_seed(0)
    mixers = ["gated_delta_net", "attention", "gated_delta_net"]
    config = HybridConfig(**SIZES, mixers=mixers, mixer_options=OPTIONS, initializer_range=0.3)
    model = HybridForCausalLM(config).eval()
    with torch.no_grad():
        for mixer in (model.model.mixers[0], model.model.mixers[2]):
            mixer.o_norm.weight.uniform_(0.5, 1.5)
    return model


def test_converted_delta_layers_compute_the_same_and_train(gdn):
    converted = convert(gdn, layers=[0, 2])
    assert converted.config.labels == ["nats_l", "attention", "nats_l"]
    with torch.no_grad():
        torch.testing.assert_close(converted(IDS).logits, gdn(IDS).logits, rtol=1e-4, atol=1e-4)
        assert not any(x.any() for x in converted.model(IDS, use_cache=False).auxiliary["softmax_share"])
    converted.train()(IDS, labels=IDS).loss.backward()
    mixer = converted.model.mixers[0]
    for part in (mixer.softmax_norm, mixer.score_proj, mixer.weight_proj, mixer.a_proj):
        assert part.weight.grad.abs().max() > 0
    with torch.no_grad():
        mixer.softmax_norm.weight.fill_(1.0)
        mixer.types = "softmax"
    converted(IDS, labels=IDS).loss.backward()
    # both softmax heads of a delta-rule head get the mean of the old norm's two halves, doubled
    grouped = convert(gdn, layers=[2], group=2).model.mixers[2]
    assert grouped.num_softmax_heads == 4
    expected = 2 * gdn.model.mixers[2].o_norm.weight.view(2, 8).mean(0)
    torch.testing.assert_close(grouped.linear_norm.weight, expected)


@pytest.mark.parametrize("source", ["core", "llama"])
def test_attention_layers_give_their_projections(gdn, source):
    if source == "llama":
        gdn = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
        gdn.model.mixers = [layer.self_attn for layer in gdn.model.layers]
    converted = convert(gdn, layers=[1], group=2)
    new, old = converted.model.mixers[1], gdn.model.mixers[1]
    assert (new.num_heads, new.head_dim, new.num_softmax_heads, new.rotary_dim) == (2, 16, 4, 8)
    x = torch.randn(2, 130, 32, generator=torch.Generator().manual_seed(1))
    q, k, v = (F.silu(part(x)).unflatten(-1, (-1, 8)) for part in (old.q_proj, old.k_proj, old.v_proj))
    # convolutions are the identity before SiLU, and two query heads share a key head
    got_q, got_k, got_v = (
        conv(part(x)).unflatten(-1, (-1, 8))
        for conv, part in ((new.q_conv, new.q_proj), (new.k_conv, new.k_proj), (new.v_conv, new.v_proj))
    )
    torch.testing.assert_close(got_q, q)
    for got, expected in ((got_k, k), (got_v, v)):
        torch.testing.assert_close(got, expected.repeat_interleave(2, 2))
    assert torch.equal(new.o_proj.weight, old.o_proj.weight)
    assert converted(IDS, labels=IDS).loss.isfinite()


def test_layers_without_a_counterpart_are_named(gdn):
    for changes, words in (
        ({"gated_delta_net": {"allow_neg_eigval": True}}, "layer 0 .* allow_neg_eigval=True"),
        ({"gated_delta_net": {"num_v_heads": 4}}, "layer 0 .* num_v_heads=4"),
        ({"gated_delta_net": {"output_gate": False}}, "layer 0 .* output_gate=False"),
        ({"attention": {"window": 7}}, "layer 1 .* window=7"),
        ({"attention": {"qkv_bias": True}}, "layer 1 .* qkv_bias=True"),
    ):
        options = {label: values | changes.get(label, {}) for label, values in OPTIONS.items()}
        config = HybridConfig(**SIZES, mixers=gdn.config.mixers, mixer_options=options)
        with pytest.raises(ValueError, match=words):
            convert(HybridForCausalLM(config))
    with pytest.raises(ValueError, match=r"layers must be some of .* 0, 1, 2, got 0, 7"):
        convert(gdn, layers=[0, 7])
    with pytest.raises(ValueError, match="group must divide the 4 heads of layer 1, got 3"):
        convert(gdn, layers=[1], group=3)


def test_command_converts_a_folder(gdn, tmp_path, capsys):
    gdn.save_pretrained(tmp_path / "gdn")
    call = ["convert", str(tmp_path / "gdn"), "--layers", "0,2", "--out", str(tmp_path / "out")]
    assert main(call) == 0
    assert "2 of 3 layers are NAtS-L" in capsys.readouterr().out
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is NatsLForCausalLM
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, gdn(IDS).logits, rtol=1e-4, atol=1e-4)
    assert main([*call[:2], "--layers", "x", "--out", str(tmp_path / "b")]) == 2
    assert "expected layers separated by commas" in capsys.readouterr().err


# fields of the authors' released configurations
AUTHORS = {
    "model_type": MODEL_TYPE, "attn_mode": "chunk", "hidden_size": 32, "num_hidden_layers": 2, "hidden_ratio": 4,
    "intermediate_size": 48, "vocab_size": 61, "hidden_act": "swish", "norm_eps": 1e-6, "initializer_range": 0.02,
    "num_heads": 2, "head_dim": 8, "expand_v": 2, "conv_size": 4, "num_attn_heads": 4, "n_ops": 2,
    "nats_block_size": 64, "ops_for_incomplete_chunks": "all", "attn_qk_norm": True, "attn_with_short_conv": True,
    "use_gate": True, "use_short_conv": True, "gdn_layers": [0], "attn_apply_pos_encoding": False,
    "decay_for_non_gdn_blocks": True, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def authors_folder(folder, **changes):
    """Write random weights under the names of the authors' code."""
    draw = torch.Generator().manual_seed(0)
    D, keys, values, width = 32, 16, 32, 48
    shapes = {
        f"{part}_proj.weight": (n, D) for part, n in zip("qkvabg", (keys, keys, values, 2, 2, values), strict=True)
    }
    shapes |= {f"{part}_conv1d.weight": (n, 1, 4) for part, n in (("q", keys), ("k", keys), ("v", values))}
    shapes |= {"A_log": (2,), "dt_bias": (2,), "o_proj.weight": (D, values)}
    own = {"nats_layer.weight": (4, D), "nats_out_weights_layer.weight": (8, keys), "q_norm.weight": (4,)}
    own |= {"k_norm.weight": (4,), "o_norm.weight1": (8,), "o_norm.weight2": (8,)}
    names = {"model.embeddings.weight": (61, D), "model.norm.weight": (D,), "lm_head.weight": (61, D)}
    for i, more in enumerate(({"o_norm.weight": (16,)}, own)):
        layer = f"model.layers.{i}"
        names |= {f"{layer}.attn.{name}": shape for name, shape in (shapes | more).items()}
        names |= {f"{layer}.attn_norm.weight": (D,), f"{layer}.mlp_norm.weight": (D,)}
        names |= {f"{layer}.mlp.{part}_proj.weight": (width, D) for part in ("gate", "up")}
        names |= {f"{layer}.mlp.down_proj.weight": (D, width)}
    weights = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in names.items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(AUTHORS | changes))
    return weights


@torch.no_grad()
def test_checkpoints_of_the_authors_have_their_types_and_weights(tmp_path, capsys):
    weights = authors_folder(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), "--out", str(tmp_path / "out")]) == 0
    assert "1 of 2 layers are NAtS-L" in capsys.readouterr().out
    model = NatsLForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.labels == ["gated_delta_net", "nats_l"]
    mixer, theirs = model.model.mixers[1], {n.removeprefix("model.layers.1.attn."): x for n, x in weights.items()}
    assert (mixer.num_softmax_heads, mixer.decay, mixer.own_chunk, mixer.rotary_dim) == (4, True, "both", None)
    x = torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(1))
    # of each head, the authors' scores have softmax first, but their output weights have the delta rule first
    scores = F.linear(x.unflatten(1, (4, 64)).mean(2), theirs["nats_layer.weight"]).unflatten(-1, (2, 2))
    softmax = (scores.argmax(-1) == 0).float()
    assert 0 < softmax.mean() < 1
    assert torch.equal(mixer.types_of(x, None).softmax, softmax)
    q = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    of_linear, of_softmax = F.linear(q, theirs["nats_out_weights_layer.weight"]).unflatten(-1, (4, 2)).unbind(-1)
    torch.testing.assert_close(mixer.weight_proj(q), torch.cat((of_linear, of_softmax), -1))
    for ours, name in (
        ("linear_norm", "o_norm.weight1"),
        ("softmax_norm", "o_norm.weight2"),
        ("q_norm", "q_norm.weight"),
    ):
        assert torch.equal(getattr(mixer, ours).weight, theirs[name])
    assert torch.equal(mixer.A_log, theirs["A_log"])
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_qk_norm", False), ("attn_with_short_conv", False), ("num_v_heads", 4), ("n_ops", 3),
        ("ops_for_incomplete_chunks", "mamba"), ("allow_neg_eigval", True), ("nats_sample_strategy", "gumble"),
    ],
)  # fmt: skip
def test_unsupported_fields_of_the_authors_are_named(field, value, tmp_path):
    authors_folder(tmp_path / "theirs", **{field: value})
    with pytest.raises(ValueError, match=field):
        load_third_party(tmp_path / "theirs", LAYOUTS)
