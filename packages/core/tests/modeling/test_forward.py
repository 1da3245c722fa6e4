"""Test the forward pass: which arguments it accepts, refuses and counts."""

import copy
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, HybridModel
from tokenmix_core.nn.loss import token_losses
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import left_padded

FIELDS = {
    "vocab_size": 59,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "mixers": ["gated_delta_net", "attention"],
    "mixer_options": {"gated_delta_net": {"num_heads": 1, "head_dim": 16}, "attention": {"num_heads": 2}},
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return HybridForCausalLM(HybridConfig(**FIELDS)).eval()


@pytest.fixture
def ids():
    return torch.randint(0, 59, (2, 11), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_inputs_embeds_replace_input_ids(model, ids):
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), model.generate(ids, **options)[:, 11:])


@torch.no_grad()
def test_logits_to_keep(model, ids):
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, logits[:, -1:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([2, 5])).logits, logits[:, [2, 5]])


@torch.no_grad()
def test_hidden_states_of_all_layers(model, ids):
    mask = left_padded([11, 4], 11)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert all(h.shape == (2, 11, 32) for h in out.hidden_states)
    assert torch.equal(out.hidden_states[-1], model.model(ids, attention_mask=mask).last_hidden_state)
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(ids))
    assert not out.hidden_states[1][1, :7].any()


def test_return_dict_false_gives_a_tuple(model, ids):
    logits, cache = model(ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits)
    assert cache.get_seq_length() == 11


def test_a_cache_is_kept_in_evaluation_and_not_in_training(model, ids):
    assert model(ids).past_key_values.get_seq_length() == 11
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, labels=ids).past_key_values is None
    assert model(ids[:1], cu_seqlens=torch.tensor([0, 4, 11])).past_key_values is None
    try:
        assert model.train()(ids).past_key_values is None
    finally:
        model.eval()


@torch.no_grad()
def test_losses_never_cross_documents_or_padding(model, ids):
    cu_seqlens = torch.tensor([0, 0, 4, 4, 11], dtype=torch.int32)
    packed = model(ids[:1], labels=ids[:1], cu_seqlens=cu_seqlens, num_items_in_batch=1).loss
    parts = [model(part, labels=part, num_items_in_batch=1).loss for part in ids[:1].split([4, 7], 1)]
    assert relative_error(packed, sum(parts)) < 1e-6
    assert relative_error(model(ids[:1], labels=ids[:1], cu_seqlens=cu_seqlens).loss, sum(parts) / 9) < 1e-6
    for mask in (left_padded([11, 4], 11), left_padded([11, 4], 11).flip(1)):
        padded = model(ids, labels=ids, attention_mask=mask, num_items_in_batch=1).loss
        rows = [model(row[m.bool()][None], labels=row[m.bool()][None], num_items_in_batch=1).loss
                for row, m in zip(ids, mask, strict=True)]  # fmt: skip
        assert relative_error(padded, sum(rows)) < 1e-6


@torch.no_grad()
def test_losses_of_single_tokens_from_hidden_states(model, ids):
    hidden = model.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
    losses = token_losses(hidden, model.lm_head.weight, ids[:, 1:].flatten())
    assert relative_error(losses.mean(), model(ids, labels=ids).loss) < 1e-6


def test_training_flops_are_three_times_the_forward_matmuls(ids):
    config = HybridConfig(**FIELDS | {"mixers": ["attention"], "mixer_options": {"attention": {"num_heads": 2}}})
    model = HybridForCausalLM(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    matmuls = sum(n for op, n in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    mixing = sum(mixer.mixing_flops(11) for mixer in model.model.mixers)
    assert mixing == 2 * 4 * 32 * 6
    assert model.flops_per_token(11) == pytest.approx(3 * (matmuls / ids.numel() + mixing))


def test_recurrences_count_flops_of_their_recurrent_form():
    config = HybridConfig(
        **FIELDS
        | {"mixers": ["gated_delta_net", "mamba2"]}
        | {"mixer_options": {"gated_delta_net": {"num_heads": 2, "head_dim": 64, "expand_v": 1.0}}}
    )
    delta, mamba = HybridModel(config).mixers
    assert delta.mixing_flops(8) == delta.mixing_flops(8000) == 6 * 2 * 64 * 64 + 2 * 4 * 3 * 128
    assert mamba.mixing_flops(8) == 4 * 64 * 128 + 2 * 4 * (64 + 256)


def call(**changed):
    ids = torch.zeros(2, 11, dtype=torch.int64)
    return {"input_ids": ids} | changed


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "exactly one of input_ids and inputs_embeds"),
        (call(inputs_embeds=torch.zeros(2, 11, 32)), "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": torch.zeros(11, dtype=torch.int64)}, r"input_ids must have shape \[B, T\].*got \[11\]"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, r"at least 1, got \[2, 0\]"),
        ({"inputs_embeds": torch.zeros(2, 11)}, r"inputs_embeds must have shape \[B, T, D\]"),
        (call(attention_mask=torch.ones(2, 10)), r"attention_mask must have shape \[B, T\] = \[2, 11\], got \[2, 10\]"),
        (call(attention_mask=torch.ones(2, 1, 11, 11)), r"got \[2, 1, 11, 11\]"),
        (call(attention_mask={"full_attention": None}), "attention_mask must be a tensor, got dict"),
        (call(position_ids=torch.zeros(2, 9)), r"position_ids must have shape \[2, 11\] or \[1, 11\], got \[2, 9\]"),
        (call(labels=torch.zeros(2, 9, dtype=torch.int64)), r"labels must have shape \[2, 11\], got \[2, 9\]"),
        (call(cu_seqlens=torch.tensor([0, 11])), "B = 1"),
        ({"input_ids": torch.zeros(1, 11, dtype=torch.int64), "cu_seqlens": torch.tensor([0, 12])}, "T = 11"),
        (
            {
                "input_ids": torch.zeros(1, 11, dtype=torch.int64),
                "cu_seqlens": torch.tensor([0, 11]),
                "use_cache": True,
            },
            "cu_seqlens and a cache exclude each other",
        ),
        (
            call(attention_mask=torch.ones(2, 11), cu_seqlens=torch.tensor([0, 11])),
            "cu_seqlens and attention_mask exclude each other",
        ),
        (call(output_attentions=True), "output_attentions=True is not available"),
        (call(mode=1), "unknown input 'mode'; inputs of the mixers are: none"),
        (call(past_key_values=()), "must be a HybridCache"),
    ],
)
def test_invalid_calls_raise(model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        model(**kwargs)


def test_a_loss_and_a_cache_exclude_each_other(model, ids):
    with pytest.raises(ValueError, match="labels and a cache exclude each other"):
        model(ids, labels=ids, past_key_values=model.make_cache())


@torch.no_grad()
def test_rows_of_padding_give_zero(model, ids):
    mask = torch.zeros_like(ids)
    assert not model.model(ids, attention_mask=mask).last_hidden_state.any()
    mask[0] = 1
    assert relative_error(model(ids, attention_mask=mask).logits[0], model(ids[:1]).logits[0]) < 1e-6


def test_unfitting_weights_raise_if_strict(model, tmp_path):
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for fields, message in (
        ({"hidden_size": 48}, "misshapen"),
        ({"intermediate_size": 0}, "unknown"),
        ({"tie_word_embeddings": False}, r"1 missing \(lm_head.weight\)"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content | fields))
        with pytest.raises(ValueError, match=message):
            HybridForCausalLM.from_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path, strict=False)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert again.lm_head.weight.isfinite().all()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises((ValueError, OSError), match="config"):
        HybridForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert type(AutoModel.from_pretrained(tmp_path)) is HybridModel


def test_a_checkpoint_without_a_weight_starts_that_weight_and_keeps_the_others(model, tmp_path):
    from safetensors.torch import load_file, save_file

    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = weights.pop("model.layers.0.mixer.A_log")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="A_log"):
        HybridForCausalLM.from_pretrained(tmp_path)
    again = HybridForCausalLM.from_pretrained(tmp_path, strict=False)
    rates = again.model.layers[0].mixer.A_log.exp()
    assert ((rates >= 1) & (rates <= 16)).all()
    assert not torch.equal(again.model.layers[0].mixer.A_log, gone)
    assert torch.equal(again.model.layers[0].mixer.dt_bias, model.model.layers[0].mixer.dt_bias)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_batch_of_padding_gives_zero_loss_and_zero_gradients(model, ids, checkpointing):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    out = model(ids, attention_mask=torch.zeros_like(ids), labels=ids, output_logits=True, output_hidden_states=True)
    assert out.loss.item() == 0
    assert all(not bool(x.any()) for x in out.hidden_states[1:])
    out.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert not bool(p.grad.any()), name
