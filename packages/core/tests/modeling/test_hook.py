"""Test that a paper's mixer fits into the unchanged backbone: own inputs, states, auxiliary losses and buffers."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from tokenmix_core.modeling import (
    HybridConfig,
    HybridForCausalLM,
    HybridModel,
    KVState,
    LayerState,
    Mixer,
    TensorState,
    register_mixer,
    register_model,
)
from tokenmix_core.modeling.auxiliary import collected_losses
from tokenmix_core.nn.attention import cached_attention
from tokenmix_core.nn.mixer import stepping
from tokenmix_core.nn.projections import output_linear
from tokenmix_core.ops import attention, chunk_ssd, without_padding
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import ModelContract, left_padded


class SwitchingMixer(Mixer):
    """Applies attention or a recurrence to each token, over equal keys; both keep states; long keys are penalised."""

    inputs = ("mode", "window")

    def __init__(self, hidden_size, *, num_heads=2, norm_eps=1e-6):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.register_buffer("penalty", torch.ones(num_heads))
        self.size = hidden_size // num_heads

    def init_weights_(self):
        nn.init.ones_(self.penalty)

    def make_state(self):
        return LayerState(
            kv=KVState(self.num_heads, self.size, self.size),
            recurrent=TensorState(self.num_heads, self.size, self.size, dtype=torch.float32),
        )

    def forward(self, hidden_states, *, state=None, cu_seqlens=None, rotary=None, mode=None, window=None):
        q, k, v = output_linear(hidden_states, self.qkv_proj).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        g = torch.full(q.shape[:3], -0.1, dtype=q.dtype)
        before = None if state is None else state.recurrent.value
        linear, after = chunk_ssd(q, k, v, g, initial_state=before, cu_seqlens=cu_seqlens)
        if state is None:
            soft = attention(q, k, v, window=window, cu_seqlens=cu_seqlens).o
        else:
            state.recurrent.set(after)
            soft = cached_attention(q, k, v, state.kv, state.span, step=stepping(hidden_states, state))
        o = soft if mode is None else torch.where(mode.bool()[..., None, None], linear, soft)
        lengths = without_padding(k.square().sum(-1), cu_seqlens)
        auxiliary = {"length_loss": (self.penalty * lengths).sum() * 1e-3, "lengths": lengths.detach().mean((0, 1))}
        return output_linear(o.flatten(-2), self.o_proj), auxiliary

    def mixing_flops(self, seq_len):
        return 4.0 * self.num_heads * self.size * (self.size + seq_len / 2)


class SwitchingConfig(HybridConfig):
    model_type = "tokenmix_test_switching"
    num_hidden_layers: int = 3
    favourite: str = "attention"


class SwitchingModel(HybridModel):
    config: SwitchingConfig

    def prepare_mixer_inputs(self, inputs, span, cu_seqlens, cache):
        """A mode may also be one number for all tokens."""
        if isinstance(mode := inputs.get("mode"), int):
            inputs = inputs | {"mode": torch.full((span.batch, span.tokens), mode)}
        return super().prepare_mixer_inputs(inputs, span, cu_seqlens, cache)


class SwitchingForCausalLM(HybridForCausalLM):
    config: SwitchingConfig
    model_class = SwitchingModel


register_mixer("switching", SwitchingMixer)
register_model(SwitchingConfig, SwitchingModel, SwitchingForCausalLM)

FIELDS = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "mixers": ["switching", "attention", "switching"],
    "mixer_options": {"attention": {"num_heads": 2}, "switching": {"num_heads": 2}},
    "favourite": "linear",
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


class TestSwitching(ModelContract):
    configs: ClassVar = {"switching": FIELDS}
    config_class = SwitchingConfig
    model_class = SwitchingModel
    causal_lm_class = SwitchingForCausalLM


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return SwitchingForCausalLM(SwitchingConfig(**FIELDS)).eval()


@pytest.fixture
def ids():
    return torch.randint(1, 61, (3, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_inputs_reach_the_mixers_that_take_them(model, ids):
    plain = model(ids, use_cache=False).logits
    for inputs in ({"mode": torch.ones_like(ids)}, {"window": 2}):
        assert not torch.allclose(model(ids, use_cache=False, **inputs).logits, plain)
    with pytest.raises(ValueError, match="unknown input 'modes'; inputs of the mixers are: mode, window"):
        model(ids, modes=1)


def test_layers_of_different_sizes_train_and_tell_what_they_have_to_tell_one_by_one(ids):
    options = {"wide": {"type": "switching", "num_heads": 4}, "narrow": {"type": "switching", "num_heads": 2}}
    mixers = {"mixers": ["wide", "narrow"], "mixer_options": options, "num_hidden_layers": 2}
    model = SwitchingForCausalLM(SwitchingConfig(**FIELDS | mixers)).train()
    out = model(ids, labels=ids)
    out.loss.backward()
    assert [x.shape for x in out.auxiliary["lengths"]] == [(4,), (2,)]
    assert out.auxiliary["length_loss"].shape == (2,)


def test_mixers_that_take_one_input_in_different_forms_are_refused_in_one_model():
    class Other(SwitchingMixer):
        @classmethod
        def prepare_input(cls, name, value, span, cu_seqlens):
            return str(value)

    register_mixer("switching otherwise", Other)
    mixers = ["switching", "switching otherwise"]
    config = HybridConfig(hidden_size=16, num_hidden_layers=2, mixers=mixers)
    with pytest.raises(ValueError, match="SwitchingMixer and Other take an input 'mode' in different forms"):
        HybridForCausalLM(config)


@torch.no_grad()
def test_an_input_for_each_token_follows_its_token_through_padding(model, ids):
    mode = torch.randint(0, 2, ids.shape, generator=torch.Generator().manual_seed(2))
    mask = left_padded([12, 7, 3], 12)
    padded = model(ids, attention_mask=mask, mode=mode, use_cache=False).logits
    for i, n in enumerate((12, 7, 3)):
        alone = model(ids[i : i + 1, -n:], mode=mode[i : i + 1, -n:], use_cache=False).logits
        assert relative_error(padded[i, -n:], alone[0]) < 1e-5


@torch.no_grad()
def test_a_family_may_take_its_inputs_in_other_forms(model, ids):
    assert type(model.model) is SwitchingModel
    mask = left_padded([12, 7, 3], 12)
    outputs = [model(ids, attention_mask=mask, mode=m, use_cache=False).logits for m in (1, torch.ones_like(ids))]
    assert torch.equal(*outputs)


def test_auxiliary_losses_do_not_change_with_accumulation(model, ids):
    def gradient(batches, num_items):
        model.zero_grad()
        for batch in batches:
            model(batch, labels=batch, num_items_in_batch=num_items).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()

    whole = gradient([ids], torch.tensor(33))
    assert relative_error(gradient(ids.split(1), torch.tensor(33)), whole) < 1e-5
    assert relative_error(gradient([ids], None), whole) < 1e-6


def test_nested_collections_of_auxiliary_losses_keep_their_own_lists(model, ids):
    with collected_losses(model.train()) as outer:
        model(ids)
        with collected_losses(model) as inner:
            model(ids)
        model(ids)
    assert (len(outer), len(inner)) == (2, 1)


@torch.no_grad()
def test_auxiliary_tensors_are_stacked_over_their_layers(model, ids):
    out = model(ids, labels=ids, num_items_in_batch=1)
    assert out.auxiliary["length_loss"].shape == (2,)
    assert out.auxiliary["lengths"].shape == (2, 2)
    model.model.layers[0].mixer.penalty.zero_()
    less = model(ids, labels=ids, num_items_in_batch=1)
    model.model.layers[0].mixer.penalty.fill_(1)
    assert less.auxiliary["length_loss"][0] == 0
    torch.testing.assert_close(less.loss + out.auxiliary["length_loss"][0], out.loss)


def test_buffers_and_own_fields_are_saved(model, tmp_path):
    model.model.layers[2].mixer.penalty.fill_(0.25)
    model.save_pretrained(tmp_path)
    model.model.layers[2].mixer.penalty.fill_(1)
    again = SwitchingForCausalLM.from_pretrained(tmp_path)
    assert again.config.favourite == "linear"
    assert again.model.layers[2].mixer.penalty.tolist() == [0.25, 0.25]


@torch.no_grad()
def test_generation_passes_inputs_on(model, ids):
    options = {"max_new_tokens": 3, "do_sample": False, "window": 3}
    assert model.generate(ids, use_cache=False, **options).shape == (3, 15)
    with pytest.raises(ValueError, match="no_such_input"):
        model.generate(ids, no_such_input=1)
