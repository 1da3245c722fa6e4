"""The layer: contracts of every mixer, the definition, and the effect of each option."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import ClassVar, get_args

import pytest
import torch

from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.mixers import MixerContract, run_in_parts, run_mixer
from tokenmix_nats_l.ablations import read_state
from tokenmix_nats_l.chunks import PATTERNS, chunk_means, learned_types
from tokenmix_nats_l.layer import Norms
from tokenmix_nats_l.mixer import NatsL

SMALL = partial(NatsL, 32, num_heads=2, head_dim=8, num_softmax_heads=4)
VARIANTS = {
    "hybrid": {},
    "rope": {"rope": True},
    "softmax": {"types": "softmax"},
    "linear": {"types": "linear"},
    "alternate": {"types": "alternate"},
    "own-softmax": {"own_chunk": "softmax"},
    "own-linear": {"own_chunk": "linear"},
    "no-decay": {"decay": False},
    "norm-sum": {"norm": "sum"},
    "weights-inputs": {"weights": "inputs"},
    "no-weights": {"weights": "none"},
    "share": {"softmax_share": 0.5},
    "wide-chunks": {"chunk": 128},
}


def build(**options) -> NatsL:
    torch.manual_seed(0)
    layer = SMALL(**options)
    for module in layer.modules():
        init_weights_(module, 0.2)
    return layer.double()


def inputs(B=2, T=170, seed=1):
    return torch.randn(B, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class TestNatsL(MixerContract):
    cases: ClassVar[dict[str, Callable[[], Mixer]]] = {n: partial(SMALL, **x) for n, x in VARIANTS.items()}
    # two and a half chunks: some are retained, some written, and one is open
    tokens = 170


def literal(layer: NatsL, tokens, types) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operations by the paper's definition: token by token, with every visible key's exponential."""
    C, (B, T, H, K), G = layer.chunk, tokens.q.shape, layer.group
    linear, softmax = [], []
    for n in range(B):
        for h in range(H):
            S, outputs = torch.zeros(K, tokens.v.shape[-1], dtype=torch.float64), []
            for first in range(0, T, C):
                inside, decay = S, torch.zeros((), dtype=torch.float64)
                for t in range(first, min(first + C, T)):
                    q, k = (x * (x.square().sum() + 1e-6).rsqrt() for x in (tokens.q[n, t, h], tokens.k[n, t, h]))
                    inside, decay = inside * tokens.g[n, t, h].exp(), decay + tokens.g[n, t, h]
                    inside = inside + torch.outer(k, tokens.beta[n, t, h] * (tokens.v[n, t, h] - inside.T @ k))
                    outputs.append(K**-0.5 * inside.T @ q)
                bare = decay.exp() * S
                S = bare + types.linear[n, first // C, h] * (inside - bare)
            linear.append(torch.stack(outputs).unflatten(-1, (G, -1)))
        for a in range(H * G):
            q, k, v = (x[n, :, a] for x in (tokens.softmax_q, tokens.softmax_k, tokens.softmax_v))
            i, j = torch.arange(T).unsqueeze(1), torch.arange(T)
            # a factor of the exponentials, 0 or 1, through which the types get their gradient
            factor = types.softmax[n, j // C, a // G]
            factor = torch.where(i // C == j // C, 1.0, factor * factor.detach()) * (j <= i)
            weights = (q @ k.T * k.shape[-1] ** -0.5).exp() * factor
            softmax.append(weights / weights.sum(1, keepdim=True) @ v)
    linear = torch.stack(linear).view(B, H, T, G, -1).transpose(1, 2).flatten(2, 3)
    return linear, torch.stack(softmax).view(B, H * G, T, -1).transpose(1, 2)


def test_both_operations_equal_the_definition_in_value_and_gradient():
    layer, x = build(), inputs(T=150)
    found = []
    for mix in (lambda *a: layer.mix(*a, None), lambda *a: literal(layer, *a)):
        leaf = x.clone().requires_grad_()
        (tokens, _), types = layer.project(leaf, None, None, None, step=False), layer.types_of(leaf, None)
        assert 0 < types.softmax.mean() < 1
        outputs = mix(tokens, types)
        assert layer.score_proj is not None
        loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outputs)
        weights = [layer.score_proj.weight, layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
        found.append((*outputs, *torch.autograd.grad(loss, [leaf, *weights, layer.q_norm.weight, layer.A_log])))
    for got, expected in zip(*found, strict=True):
        assert expected.norm() > 0
        assert relative_error(got, expected) < 1e-9


def test_types_are_exact_and_inactive_operations_have_no_gradient():
    scores = torch.randn(1, 4, 6, dtype=torch.float64, requires_grad=True)
    types = learned_types(scores)
    assert torch.equal(types.linear + types.softmax, torch.ones_like(types.linear))
    assert set(types.linear.unique().tolist()) == {0.0, 1.0}
    shares = scores.unflatten(-1, (2, 3)).softmax(-2)
    # gradient of a softmax s: s_a (d_a − Σ_b s_b d_b), where d is 1 for the linear scores of linear chunks, else 0
    (got,) = torch.autograd.grad(types.linear.sum(), scores)
    d = torch.stack((types.linear.detach(), torch.zeros_like(types.linear)), -2)
    expected = shares * (d - (shares * d).sum(-2, keepdim=True))
    torch.testing.assert_close(got.unflatten(-1, (2, 3)), expected)


def test_last_chunk_has_no_score_gradient():
    layer, x = build(), inputs(T=128)
    tokens, _ = layer.project(x, None, None, None, step=False)
    types = layer.types_of(x, None)
    types = types._replace(
        linear=types.linear.detach().requires_grad_(), softmax=types.softmax.detach().requires_grad_()
    )
    linear, softmax = layer.mix(tokens, types, None)
    of_linear, of_softmax = torch.autograd.grad(linear.sum() + softmax.sum(), [types.linear, types.softmax])
    assert of_linear[:, 1].abs().max() == 0
    assert of_softmax[:, 1].abs().max() == 0
    assert of_linear[:, 0].abs().max() > 0


def test_partial_chunk_has_the_mean_of_its_tokens():
    x = inputs(T=70)
    means = chunk_means(x, 64)
    torch.testing.assert_close(means[:, 1], x[:, 64:].mean(1))
    boundaries = torch.tensor([0, 3, 3, 70])
    packed = chunk_means(x[:1], 64, boundaries)
    torch.testing.assert_close(packed[0, 0], x[0, :3].mean(0))
    torch.testing.assert_close(packed[0, 2], x[0, 3:67].mean(0))
    torch.testing.assert_close(packed[0, 3], x[0, 67:].mean(0))
    # slot 1 belongs to no chunk
    weights = torch.tensor([1.0, 0, 2, 3], dtype=x.dtype).unsqueeze(1).expand(packed.shape)
    leaf = x[:1].clone().requires_grad_()
    (got,) = torch.autograd.grad((chunk_means(leaf, 64, boundaries) * weights).sum(), leaf)
    shares = torch.cat([weights[0, i].expand(n, -1) / n for i, n in ((0, 3), (2, 64), (3, 3))])
    torch.testing.assert_close(got[0], shares)


@pytest.mark.parametrize(
    "options",
    [
        {"own_chunk": "softmax"},
        {"own_chunk": "linear"},
        {"decay": False},
        {"norm": "sum"},
        {"weights": "inputs"},
        {"weights": "none"},
        {"types": "softmax"},
        {"types": "linear"},
        {"chunk": 128},
    ],
)
def test_every_option_changes_the_outputs(options):
    # long enough that a linear chunk, a softmax one and a third follow each other
    x = inputs(T=400)
    plain, changed = build(), build(**options)
    changed.load_state_dict(plain.state_dict() | {
        name: value for name, value in changed.state_dict().items()
        if name not in plain.state_dict() or value.shape != plain.state_dict()[name].shape
    }, strict=False)  # fmt: skip
    with torch.no_grad():
        assert relative_error(run_mixer(changed, x), run_mixer(plain, x)) > 1e-3


@pytest.mark.parametrize("own_chunk", ["both", "softmax", "linear"])
@pytest.mark.parametrize("types", ["learned", *PATTERNS, "lls"])
def test_every_parameter_has_a_gradient_for_all_options(types, own_chunk):
    for decay, norm in itertools.product((True, False), get_args(Norms)):
        layer = build(types=types, own_chunk=own_chunk, decay=decay, norm=norm)
        for boundaries in (None, torch.tensor([0, 1, 1, 64])):
            layer.zero_grad()
            run_mixer(layer, inputs(B=1, T=64), cu_seqlens=boundaries).square().sum().backward()
            assert [name for name, p in layer.named_parameters() if p.grad is None] == [], (decay, norm)


def test_own_chunk_linear_has_no_attention_in_the_first_chunk():
    layer, x = build(own_chunk="linear", types="softmax"), inputs()
    tokens, _ = layer.project(x, None, None, None, step=False)
    _, softmax = layer.mix(tokens, layer.types_of(x, None), None)
    assert softmax[:, :64].abs().max() == 0
    assert softmax[:, 64:].abs().min() > 0


def test_own_chunk_softmax_has_no_delta_rule_in_the_first_chunk():
    layer, x = build(own_chunk="softmax", types="linear"), inputs()
    tokens, _ = layer.project(x, None, None, None, step=False)
    linear, _ = layer.mix(tokens, layer.types_of(x, None), None)
    assert linear[:, :64].abs().max() == 0
    assert linear[:, 64:].abs().max() > 0


def test_softmax_chunks_without_decay_do_not_change_the_state():
    layer, x = build(decay=False, types="softmax"), inputs(T=300)
    tokens, _ = layer.project(x, None, None, None, step=False)
    linear, _ = layer.mix(tokens, layer.types_of(x, None), None)
    # every chunk starts from the empty state
    alone = type(tokens)(*(y[:, 128:192] for y in tokens))
    torch.testing.assert_close(linear[:, 128:192], layer.delta_rule(alone, None)[0])


@pytest.mark.parametrize("boundaries", [None, [0, 1, 1, 200, 270, 334, 400]])
@pytest.mark.parametrize("own_chunk", ["both", "softmax"])
def test_chunks_without_decay_start_from_the_writes_of_linear_chunks(own_chunk, boundaries):
    layer, x = build(decay=False, own_chunk=own_chunk), inputs(B=1 if boundaries else 2, T=400)
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries)
    leaf = x.requires_grad_()
    tokens, _ = layer.project(leaf, None, cu_seqlens, None, step=False)
    types = layer.types_of(leaf, cu_seqlens)
    assert 0 < types.linear.mean() < 1
    linear, _ = layer.mix(tokens, types, cu_seqlens)
    weights = torch.randn_like(linear)

    expected = []
    for start, end in itertools.pairwise(boundaries or [0, 400]):
        state, first = x.new_zeros(len(x), *layer.fit.state_shape(layer.num_heads)), start // 64
        for i, at in enumerate(range(start, end, 64)):
            chunk = type(tokens)(*(y[:, at : min(at + 64, end)] for y in tokens))
            o, after = layer.delta_rule(chunk, None, state)
            if own_chunk == "softmax":
                o = read_state(layer, chunk, state, state.new_zeros(state.shape[:2]))
            expected.append(o)
            slot = i if boundaries is None else first + boundaries.index(end) - 1 + i
            state = state + layer.fit.gates(types.linear[:, slot])[..., None, None] * (after - state)
    expected = torch.cat(expected, 1)
    torch.testing.assert_close(linear, expected)
    got, wanted = (torch.autograd.grad((y * weights).sum(), leaf, retain_graph=True)[0] for y in (linear, expected))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("types", "held"), [("softmax", 128), ("linear", 0), ("alternate", 64)])
def test_only_keys_of_softmax_chunks_are_retained(types, held):
    layer = build(types=types)
    for split in ([170], [1] * 170, [100, 70]):
        with torch.no_grad():
            _, cache = run_in_parts(layer, inputs(), split)
        lengths = layer.held_tokens(cache.layers[0])
        assert (0 if lengths is None else int(lengths.max())) == held


def test_budget_loss_moves_the_share():
    layer, x = build(budget=0.0), inputs()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    shares = []
    for _ in range(40):
        _, auxiliary = layer(x)
        shares.append(auxiliary["softmax_share"].mean().item())
        optimizer.zero_grad()
        (auxiliary["budget_loss"] / x.shape[1]).backward()
        optimizer.step()
    assert shares[-1] < shares[0]
    assert shares[-1] < 0.1


def test_share_counts_only_real_chunks():
    layer, x = build(types="softmax"), inputs(B=1)
    for boundaries in (None, torch.tensor([0, 5, 5, 100, 170])):
        _, auxiliary = layer(x, cu_seqlens=boundaries)
        torch.testing.assert_close(auxiliary["softmax_share"], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_softmax_heads": 3}, "num_softmax_heads"),
        ({"num_heads": 0}, "num_softmax_heads"),
        ({"head_dim": 7, "expand_v": 1.5}, "head_dim"),
        ({"head_dim": 9}, "softmax heads"),
        ({"head_dim": 6, "rope": True}, "of even size"),
        ({"chunk": 32}, "chunk"),
        ({"chunk": 100}, "chunk"),
        ({"types": "random"}, "types"),
        ({"own_chunk": "none"}, "own_chunk"),
        ({"norm": "no"}, "norm"),
        ({"weights": "keys"}, "weights"),
        ({"budget": 2.0}, "budget"),
        ({"budget": 0.5, "types": "linear"}, "budget"),
        ({"budget": 0.5, "budget_weight": -1.0}, "budget_weight"),
        ({"softmax_share": 0.0}, "softmax_share"),
        ({"softmax_share": 0.5, "types": "alternate"}, "softmax_share"),
        ({"softmax_share": 0.5, "budget": 0.5}, "not both"),
    ],
)
def test_invalid_options_raise(options, words):
    with pytest.raises(ValueError, match=words):
        SMALL(**options)


@torch.no_grad()
@pytest.mark.parametrize("types", [*PATTERNS, "lls"])
def test_assigned_types_replace_learned_ones_in_all_calls(types):
    learned, forced, x = build(), build(types=types), inputs()
    forced.load_state_dict({name: p for name, p in learned.state_dict().items() if "score_proj" not in name})
    before = run_mixer(learned, x)
    learned.types = types
    assert learned.types == types
    assert torch.equal(run_mixer(learned, x), run_mixer(forced, x))
    (got, _), (expected, _) = (run_in_parts(layer, x, [100, 70]) for layer in (learned, forced))
    torch.testing.assert_close(got, expected)
    learned.types = "learned"
    assert torch.equal(run_mixer(learned, x), before)


def test_invalid_assigned_types_raise():
    with pytest.raises(ValueError, match="types must be one of"):
        build().types = "random"
    with pytest.raises(ValueError, match="cannot learn types"):
        build(types="softmax").types = "learned"
