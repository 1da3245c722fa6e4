"""The LTE layer: contracts of every mixer, the definition, and each option's effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.nn.attention import Attention
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.rotary import RotaryEmbedding, apply_rotary
from tokenmix_core.nn.state import Span
from tokenmix_core.ops import kept_attention
from tokenmix_core.ops.types import AttentionOutput
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import Watched
from tokenmix_core.testing.mixers import MixerContract, run_in_parts, run_mixer
from tokenmix_lte import decoding
from tokenmix_lte.mixer import Lte
from tokenmix_lte.retention import Retention, Tokens

# windows, caps and sinks so small that keys are evicted
SMALL = partial(Lte, 32, num_heads=4, num_kv_heads=2, head_dim=8, window=16, cap=5, sinks=2, dropout=0.0)
VARIANTS = {
    "paper": {},
    "narrow": {"window": 13, "cap": 3},
    "wide": {"window": 21, "cap": 4},
    "causal": {"scorer": "causal"},
    "mlp": {"scorer": "mlp", "window": 3},
    "window-alone": {"scorer": "none", "window": 5},
    "no-sinks": {"sinks": 0},
    "uniform": {"scorer": "uniform", "window": 5, "cap": 8, "sinks": 0},
    "inside": {"estimator": "inside"},
    "norms and biases": {"qk_norm": True, "qkv_bias": True},
}


class TestLte(MixerContract):
    cases: ClassVar[dict[str, Callable[[], Mixer]]] = {n: partial(SMALL, **x) for n, x in VARIANTS.items()}
    # several times the window and the cap
    tokens = 60


def build(**options) -> Lte:
    torch.manual_seed(0)
    layer = SMALL(**options)
    for module in layer.modules():
        init_weights_(module, 0.3)
    return layer.double().eval()


def inputs(B=2, T=60, seed=1) -> Tensor:
    return torch.randn(B, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heads(layer: Lte, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, rotated k, k before rotation, and v."""
    rotary = RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.arange(x.shape[1]).unsqueeze(0))
    q, raw, v = (f(x).unflatten(-1, (-1, 8)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    return apply_rotary(q, rotary), apply_rotary(raw, rotary), raw, v


def literal(layer: Lte, x: Tensor, *, cap: int | None) -> tuple[Tensor, int]:
    """Compute the paper's definition token by token, with a list of retained keys; return also how many it evicts."""
    q, k, raw, v = heads(layer, x)
    logits, (B, T, H, K) = layer.retention.logits(raw, v), k.shape
    group, out, evicted = q.shape[2] // H, torch.zeros_like(q), 0
    for b in range(B):
        for h in range(H):
            retained: list[int] = []
            for i in range(T):
                j = i - layer.window
                if j >= 0 and (j < layer.sinks or logits[b, j, h] > 0):
                    retained.append(j)
                    if cap is not None and len(retained) > cap:
                        # sinks stay; the lowest logit is evicted, among equal ones the youngest
                        worst = min(retained, key=lambda t: (t < layer.sinks, float(logits[b, t, h]), -t))
                        retained.remove(worst)
                        evicted += 1
                seen = [*retained, *range(max(0, i - layer.window + 1), i + 1)]
                for a in range(h * group, (h + 1) * group):
                    weights = (k[b, seen, h] @ q[b, i, a] * K**-0.5).softmax(0)
                    out[b, i, a] = weights @ v[b, seen, h]
    return layer.o_proj(out.flatten(-2)), evicted


@pytest.mark.parametrize("options", [{}, {"scorer": "mlp"}, {"scorer": "causal"}, {"scorer": "none"}, {"sinks": 0}])
@torch.no_grad()
def test_evaluation_agrees_with_a_decoder_that_evicts_one_key_at_a_time(options):
    layer, x = build(**options), inputs()
    expected, evicted = literal(layer, x, cap=layer.cap)
    assert relative_error(run_mixer(layer, x), expected) < 1e-11
    assert evicted > 0 or options.get("scorer") == "none"


@torch.no_grad()
def test_training_has_no_cap():
    layer, x = build(), inputs()
    expected, _ = literal(layer, x, cap=None)
    assert relative_error(run_mixer(layer.train(), x), expected) < 1e-11
    assert relative_error(run_mixer(layer.eval(), x), expected) > 1e-3


@torch.no_grad()
def test_steps_agree_with_the_forward_pass_for_700_tokens():
    layer, x = build(), inputs(B=1, T=700, seed=3)
    whole = run_mixer(layer, x)
    for lengths in ([1] * 700, [333, *[1] * 200, 167]):
        assert relative_error(run_in_parts(layer, x, lengths)[0], whole) < 1e-11


@torch.no_grad()
def test_among_equal_scores_the_youngest_is_evicted_first():
    layer, x = build(), inputs(B=1, T=80)
    # every logit is 0.5
    layer.scorer.weight.zero_()
    layer.scorer.bias.fill_(0.5)
    whole = run_mixer(layer, x)
    assert relative_error(whole, literal(layer, x, cap=layer.cap)[0]) < 1e-11
    _, cache = run_in_parts(layer, x, [1] * 80)
    ages = cache.layers[0].ages.value
    assert torch.equal(ages.sort(-1).values, torch.arange(5, dtype=torch.int32).expand_as(ages))
    assert relative_error(run_in_parts(layer, x, [1] * 80)[0], whole) < 1e-11


def test_logits_get_the_straight_through_gradient_of_values():
    layer, x = build(), inputs()
    layer.train()
    q, k, raw, v = heads(layer, x)
    logits, seen = layer.retention.logits(raw.detach(), v.detach()), v.detach().requires_grad_()
    keep = (logits > 0) | (torch.arange(60)[:, None] < 2)
    do = torch.randn(2, 60, 4, 8, dtype=torch.float64)
    dv = torch.autograd.grad((kept_attention(q, k, seen, keep, window=16).o * do).sum(), seen)[0]
    expected = torch.autograd.grad(
        logits, list(layer.scorer.parameters()), (dv * seen).sum(-1).detach() * (logits.sigmoid() * (-logits).sigmoid())
    )
    tokens = Tokens(q.detach(), k.detach(), raw.detach(), v.detach())
    o, _ = layer._whole(tokens, None)
    got = torch.autograd.grad((o * do).sum(), list(layer.scorer.parameters()))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-10


def test_with_estimator_inside_only_retained_keys_give_the_scorer_gradients():
    layer, x = build(estimator="inside"), inputs(B=1, T=16)
    # all tokens are inside the window
    layer.train()
    out = run_mixer(layer, x).square().sum()
    weights = list(layer.scorer.parameters())
    assert not any(g is not None and g.any() for g in torch.autograd.grad(out, weights, allow_unused=True))
    out = run_mixer(layer, inputs(B=1)).square().sum()
    assert all(g.any() for g in torch.autograd.grad(out, weights))


@pytest.mark.parametrize("boundaries", [None, [0, 5, 5, 20, 60]])
def test_the_sparsity_loss_is_the_excess_of_final_scores(boundaries):
    layer, x = build(), inputs(B=1)
    layer.train()
    layer.sparsity.weight.copy_(torch.tensor([0.3, 0.7]))
    layer.num_lte_layers = 3
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    positions = torch.arange(60) if boundaries is None else torch.cat([torch.arange(n) for n in (5, 0, 15, 40)])
    rotary = RotaryEmbedding(8, {"rope_theta": 10_000.0})(positions.unsqueeze(0))
    _, auxiliary = layer(x, cu_seqlens=cu_seqlens, rotary=rotary)
    _, _, raw, v = heads(layer, x)
    logits = layer.retention.logits(raw, v, cu_seqlens=cu_seqlens)[0]
    counted = torch.zeros(60, dtype=torch.bool)
    for start, stop in ((0, 60),) if boundaries is None else ((0, 5), (5, 20), (20, 60)):
        counted[start : max(start, stop - 6)] = True
    share = logits[counted].sigmoid()
    expected = ((share - 0.5).relu() * layer.sparsity.weight).sum() / (2 * 3)
    torch.testing.assert_close(auxiliary["sparsity_loss"], expected)
    torch.testing.assert_close(auxiliary["kept_share"], (share > 0.5).double().mean(0))
    torch.testing.assert_close(layer.sparsity.total / layer.sparsity.count, (share > 0.5).double().mean(0))


@torch.no_grad()
def test_the_held_share_agrees_with_the_state():
    layer, x = build(), inputs(B=2, T=33)
    rotary = RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.arange(33).unsqueeze(0))
    _, auxiliary = layer(x, rotary=rotary)
    _, cache = run_in_parts(layer, x, [33])
    held = cache.layers[0].kv.lengths - layer.window
    torch.testing.assert_close(auxiliary["held_share"], (held.double() / (33 - layer.window)).mean(0).float())


@torch.no_grad()
def test_bfloat16_scores_agree_in_any_split_of_the_calls():
    layer, x = build(window=32, cap=8), inputs(T=200)
    layer, x = layer.bfloat16(), x.bfloat16()
    whole = run_mixer(layer, x)
    for lengths in ([1] * 200, [90, *[1] * 60, 50]):
        assert relative_error(run_in_parts(layer, x, lengths)[0], whole) < 2e-2


@torch.no_grad()
def test_the_state_has_a_constant_size_from_the_first_token_on():
    layer = build()
    sizes = {run_in_parts(layer, inputs(T=n), [n])[1].allocated_nbytes for n in (1, 12, 60)}
    assert len(sizes) == 1


def test_the_paper_s_state_is_two_and_a_half_mebibytes_and_the_scorer_s_inputs():
    layer = Lte(64, num_heads=32, num_kv_heads=8, head_dim=64)
    keys = (768 + 512) * 8 * 128 * 2
    assert keys == 2.5 * 2**20
    scoring = 8 * (768 + 512) * 4 + 8 * 512 * 4 + 76 * 8 * 64 * 2 + 8 * 4
    assert layer.state_bytes(1) == layer.state_bytes(10**6) == keys + scoring
    # 32,385 parameters per head: 1.73 % of the 0.4B model
    assert sum(p.numel() for p in layer.scorer.parameters()) == 8 * 32_385


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_heads": 0, "num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": None, "num_heads": 5, "num_kv_heads": 5}, "hidden_size"),
        ({"head_dim": 6}, "head_dim"),
        ({"sinks": 6}, "sinks"),
        ({"cap": 0, "sinks": 0}, "cap"),
        ({"window": 12}, "window must be at least 13"),
        ({"dropout": 1.0}, "dropout"),
        ({"scorer": "rnn"}, "scorer"),
        ({"estimator": "outside"}, "estimator"),
    ],
)
def test_malformed_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SMALL(**options)


@torch.no_grad()
def test_uniform_retains_every_n_th_token_when_these_fill_the_cap():
    layer = build(scorer="uniform", window=5, cap=8, sinks=0)
    for held, step in ((8, 1), (16, 2), (32, 4)):
        _, cache = run_in_parts(layer, inputs(B=1, T=held + 5), [1] * (held + 5))
        ages = cache.layers[0].ages.value.sort(-1).values
        assert torch.equal(ages, torch.arange(0, held, step, dtype=torch.int32).expand_as(ages))
    # in between, the newest tokens have been replaced first
    _, cache = run_in_parts(layer, inputs(B=1, T=12 + 5), [12, 5])
    assert cache.layers[0].ages.value[0, 0].sort().values.tolist() == [0, 1, 2, 3, 4, 6, 8, 10]


def test_layers_without_a_scorer_have_the_weights_of_attention():
    weights = dict(Attention(32, num_heads=4, num_kv_heads=2, head_dim=8).named_parameters())
    for scorer in ("none", "uniform"):
        layer = build(scorer=scorer)
        assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in weights.items()}
        assert not list(layer.buffers())


@pytest.mark.slow
@torch.no_grad()
def test_split_calls_agree_with_one_call_for_thousands_of_tokens():
    torch.manual_seed(0)
    layer = Lte(16, num_heads=1, head_dim=8, window=64, cap=32, sinks=2)
    for module in layer.modules():
        init_weights_(module, 0.3)
    layer = layer.double().eval()
    x = torch.randn(1, 32768, 16, dtype=torch.float64)
    whole = run_mixer(layer, x)
    got, _ = run_in_parts(layer, x, [20_000, *[1] * 700, 12_068])
    assert relative_error(got, whole) < 1e-11


def test_under_autocast_scores_are_float32_and_everything_learns():
    layer, x = build().float().train(), inputs(T=60).float()
    with torch.autocast("cpu", torch.bfloat16):
        out, auxiliary = layer(x, rotary=RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.arange(60).unsqueeze(0)))
    assert auxiliary["sparsity_loss"].dtype == torch.float32
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    exact = run_mixer(build().train(), inputs(T=60))
    assert relative_error(out, exact) < 0.1


@torch.no_grad()
def test_kernels_agree_with_the_eager_layer_in_prefill_and_steps(device):
    eager, kernels = (build(head_dim=16, cap=8, impl=impl).float().to(device) for impl in ("reference", "triton"))
    x = inputs(B=1, T=43).float().to(device)
    whole = run_mixer(eager, x)
    outputs, _ = run_in_parts(kernels, x, [28, *[1] * 15])
    torch.testing.assert_close(outputs, whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("scorer", ["cnn", "uniform"])
def test_a_prompt_of_any_length_takes_at_most_40_operations_without_synchronisation(scorer, monkeypatch):
    layer = build(scorer=scorer)
    # replace the three operations that have kernels: attention, eviction times and the scorer
    monkeypatch.setattr(decoding, "kept_attention", lambda q, *_, **options: AttentionOutput(q, q[..., 0]))
    monkeypatch.setattr(decoding, "eviction_times", lambda ranks, *_, **options: ranks.to(torch.int32))
    monkeypatch.setattr(Retention, "logits", lambda _, raw, v: raw[..., 0])

    def operations(T):
        state, seen = layer.make_state(), []
        state.span = Span(2, T, torch.device("cpu"))
        q, k, raw, v = heads(layer, inputs(T=T))
        with Watched(lambda func, *_: seen.append(func) if not func.is_view else None):
            decoding.extend(layer.retention, Tokens(q, k, raw, v), state)
        return seen

    assert len(operations(22)) == len(operations(300)) <= 40
