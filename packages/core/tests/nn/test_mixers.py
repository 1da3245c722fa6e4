"""Test the core mixers by the contract of mixers and against their equations."""

from typing import ClassVar

import pytest
import torch

from tokenmix_core.modeling import HybridCache, HybridConfig, HybridForCausalLM
from tokenmix_core.nn import registry
from tokenmix_core.nn.attention import Attention, cached_attention_lse
from tokenmix_core.nn.gated_delta_net import GatedDeltaNet
from tokenmix_core.nn.mamba2 import Mamba2
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.state import KVState, LayerState, StatePart
from tokenmix_core.ops import attention
from tokenmix_core.testing.mixers import MixerContract


class TestAttention(MixerContract):
    cases: ClassVar = {
        "full": lambda: Attention(32, num_heads=4),
        "grouped": lambda: Attention(32, num_heads=4, num_kv_heads=2, qk_norm=True, qkv_bias=True),
        "window": lambda: Attention(32, num_heads=2, head_dim=10, window=5),
        "window of one": lambda: Attention(32, num_heads=2, window=1),
        "sinks": lambda: Attention(32, num_heads=4, num_kv_heads=1, window=4, sinks=3),
        "no positions": lambda: Attention(32, num_heads=4, rope=False),
    }


class TestGatedDeltaNet(MixerContract):
    cases: ClassVar = {
        "plain": lambda: GatedDeltaNet(32, num_heads=2, head_dim=64, expand_v=1.0),
        "grouped values": lambda: GatedDeltaNet(32, num_heads=1, num_v_heads=2, head_dim=16, allow_neg_eigval=True),
        "no gate": lambda: GatedDeltaNet(32, num_heads=1, head_dim=8, expand_v=1.5, output_gate=False, conv_size=2),
    }


class TestMamba2(MixerContract):
    cases: ClassVar = {
        "plain": lambda: Mamba2(32, head_dim=16, state_size=16),
        "groups": lambda: Mamba2(32, head_dim=16, state_size=12, num_groups=2, conv_size=3),
    }


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
def test_cached_attention_returns_log_sum_exp_for_any_split_and_padding(window):
    q, k, v = (torch.randn(2, 9, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    whole = attention(q, k, v, window=window)
    # sequence 1 begins two tokens later
    whole_late = attention(q[1:, 2:], k[1:, 2:], v[1:, 2:], window=window)
    for chunks in ([9], [1] * 9, [4, 1, 4]):
        for mask in (None, torch.arange(9) >= torch.tensor([[0], [2]])):
            cache, outputs, start = HybridCache([LayerState(kv=KVState(2, 8, 8, window=window))]), [], 0
            for chunk in chunks:
                part = slice(start, start + chunk)
                real = None if mask is None or bool(mask[:, part].all()) else mask[:, part]
                span = cache.begin(2, chunk, q.device, real)
                args = (span.pack(x[:, part]) for x in (q, k, v))
                step = chunk == 1 and real is None
                out = cached_attention_lse(*args, cache.layers[0].kv, span, step=step)
                outputs.append([span.unpack(x) for x in out])
                cache.end()
                start += chunk
            o, lse = (torch.cat(x, 1) for x in zip(*outputs, strict=True))
            torch.testing.assert_close((o[0], lse[0]), (whole.o[0], whole.lse[0]))
            late = (whole.o[1], whole.lse[1]) if mask is None else (whole_late.o[0], whole_late.lse[0])
            torch.testing.assert_close((o[1, -len(late[0]) :], lse[1, -len(late[0]) :]), late)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(32, num_heads=5), "must divide hidden_size, got 5 and 32"),
        (lambda: Attention(32, num_heads=4, num_kv_heads=3), "multiple of num_kv_heads, got 4 and 3"),
        (lambda: Attention(32, num_heads=4, head_dim=7), "even head_dim, got 7"),
        (lambda: Attention(32, num_heads=4, window=0), "window must be None or at least 1, got 0"),
        (lambda: Attention(32, num_heads=4, sinks=2), "sinks go with a window"),
        (lambda: GatedDeltaNet(32, num_heads=2, num_v_heads=3), "multiple of num_heads, got 3 and 2"),
        (lambda: GatedDeltaNet(32, num_heads=2, head_dim=9, expand_v=1.5), "must be whole and positive"),
        (lambda: GatedDeltaNet(32, num_heads=1, head_dim=300), "go up to 256, got 300"),
        (lambda: GatedDeltaNet(32, num_heads=1, head_dim=8, conv_size=9), "from 2 to 8, got 9"),
        (lambda: Mamba2(32, head_dim=48), "head_dim must divide expand"),
        (lambda: Mamba2(32, head_dim=16, num_groups=3), "num_groups must divide the 4 heads"),
    ],
)
def test_invalid_sizes_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Sum(Mixer):
    """A mixer that has only a forward."""

    def __init__(self, hidden_size: int, norm_eps: float = 1e-6) -> None:
        super().__init__()

    def forward(self, hidden_states, **inputs):
        return hidden_states.cumsum(1), None


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda mixer: mixer.make_state(), r"Sum must define make_state\(\), .* use_cache=False\) does without"),
        (lambda mixer: mixer.mixing_flops(8), r"Sum must define mixing_flops\(seq_len\), which returns"),
        (lambda mixer: Mixer.forward(mixer, torch.zeros(1, 1, 4)), r"Sum must define forward\(hidden_states"),
        (lambda mixer: StatePart().clear(), r"StatePart must define clear\(\), which drops all contents"),
    ],
)
def test_missing_method_of_a_subclass_raises_with_its_purpose(call, told):
    with pytest.raises(ValueError, match=told):
        call(Sum(4))


def test_mixer_without_state_generates_without_cache_only(monkeypatch):
    monkeypatch.setitem(registry._MIXERS, "sum", Sum)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = HybridForCausalLM(HybridConfig(**sizes, mixers=["sum"])).eval()
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"Sum must define make_state\(\)"):
        model.generate(prompt, **options)
    assert model.generate(prompt, use_cache=False, **options).shape == (1, 5)
