"""Test mixers, MLP and initial values against their equations, written token by token in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from tokenmix_core.nn.attention import Attention, mean_visible
from tokenmix_core.nn.gated_delta_net import GatedDeltaNet
from tokenmix_core.nn.head_padding import HeadFit
from tokenmix_core.nn.init import init_decay_, init_time_step_, init_weights_
from tokenmix_core.nn.mamba2 import Mamba2
from tokenmix_core.nn.mlp import SwiGLU, swiglu_width
from tokenmix_core.nn.norm import RMSNorm
from tokenmix_core.nn.rotary import RotaryEmbedding
from tokenmix_core.ops import chunk_gated_delta_rule, chunk_ssd
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.mixers import run_mixer

WIDTH, TOKENS = 24, 11


def prepared(module):
    torch.manual_seed(0)
    for child in module.modules():
        init_weights_(child, 0.3)
        if isinstance(child, RMSNorm) or hasattr(child, "groups"):
            torch.nn.init.uniform_(child.weight, 0.5, 1.5)
    return module.double().eval()


@pytest.fixture
def x():
    return torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def conv_silu(x, weight, bias=None):
    """Convolve x `[T, D]` with weight `[D, W]`, and apply SiLU."""
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    out = torch.stack([(padded[t : t + width] * weight.T).sum(0) for t in range(len(x))])
    return F.silu(out if bias is None else out + bias)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_attention(x, window):
    m = prepared(Attention(WIDTH, num_heads=6, num_kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True, window=window))
    cos, sin = RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.arange(TOKENS).unsqueeze(0))

    def rotate(h):
        pairs = torch.complex(h[..., :4], h[..., 4:]) * torch.complex(cos, sin)[0].unsqueeze(1)
        return torch.cat((pairs.real, pairs.imag), -1)

    def norm(h, weight):
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    q = rotate(norm(m.q_proj(x[0]).view(TOKENS, 6, 8), m.q_norm.weight))
    k = rotate(norm(m.k_proj(x[0]).view(TOKENS, 2, 8), m.k_norm.weight))
    v = m.v_proj(x[0]).view(TOKENS, 2, 8)
    o = torch.zeros(TOKENS, 6, 8, dtype=torch.float64)
    for t in range(TOKENS):
        seen = slice(0 if window is None else max(0, t - window + 1), t + 1)
        for h in range(6):
            p = (k[seen, h // 3] @ q[t, h] / math.sqrt(8)).softmax(0)
            o[t, h] = p @ v[seen, h // 3]
    assert relative_error(run_mixer(m, x)[0], m.o_proj(o.flatten(1))) < 1e-12


@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_gated_delta_net(x, negative):
    m = prepared(GatedDeltaNet(WIDTH, num_heads=2, num_v_heads=4, head_dim=6, allow_neg_eigval=negative))
    q = unit(conv_silu(m.q_proj(x[0]), m.q_conv.weight).view(TOKENS, 2, 6))
    k = unit(conv_silu(m.k_proj(x[0]), m.k_conv.weight).view(TOKENS, 2, 6))
    v = conv_silu(m.v_proj(x[0]), m.v_conv.weight).view(TOKENS, 4, 12)
    alpha = torch.exp(-m.A_log.exp() * F.softplus(m.a_proj(x[0]) + m.dt_bias))
    beta = (2 if negative else 1) * m.b_proj(x[0]).sigmoid()
    o = torch.zeros(TOKENS, 4, 12, dtype=torch.float64)
    for h in range(4):
        state = torch.zeros(6, 12, dtype=torch.float64)
        for t in range(TOKENS):
            b_k, b_q = k[t, h // 2], q[t, h // 2]
            state = alpha[t, h] * (state - beta[t, h] * torch.outer(b_k, b_k @ state))
            state = state + beta[t, h] * torch.outer(b_k, v[t, h])
            o[t, h] = b_q @ state / math.sqrt(6)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * m.o_norm.weight
    o = o * F.silu(m.g_proj(x[0])).view(TOKENS, 4, 12)
    assert relative_error(run_mixer(m, x)[0], m.o_proj(o.flatten(1))) < 1e-12


@torch.no_grad()
def test_mamba2(x):
    m = prepared(Mamba2(WIDTH, head_dim=8, state_size=5, num_groups=2))
    torch.nn.init.uniform_(m.D, 0.5, 1.5)
    z, mixed, dt = m.in_proj(x[0]).split((48, 48 + 20, 6), 1)
    mixed = conv_silu(mixed, m.conv.weight, m.conv.bias)
    u, B, C = mixed[:, :48].view(TOKENS, 6, 8), mixed[:, 48:58].view(TOKENS, 2, 5), mixed[:, 58:].view(TOKENS, 2, 5)
    dt = F.softplus(dt + m.dt_bias)
    y = torch.zeros(TOKENS, 6, 8, dtype=torch.float64)
    for h in range(6):
        state = torch.zeros(5, 8, dtype=torch.float64)
        for t in range(TOKENS):
            state = torch.exp(-m.A_log[h].exp() * dt[t, h]) * state + torch.outer(B[t, h // 3], dt[t, h] * u[t, h])
            y[t, h] = C[t, h // 3] @ state + m.D[h] * u[t, h]
    gated = (y.flatten(1) * F.silu(z)).view(TOKENS, 2, 24)
    normed = (gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1) * m.norm.weight
    assert relative_error(run_mixer(m, x)[0], m.out_proj(normed)) < 1e-12


@torch.no_grad()
def test_swiglu(x):
    m = prepared(SwiGLU(WIDTH, 40))
    gate, up = x @ m.gate_proj.weight.T, x @ m.up_proj.weight.T
    assert relative_error(m(x), (gate / (1 + torch.exp(-gate)) * up) @ m.down_proj.weight.T) < 1e-13
    assert swiglu_width(1024) == 2816
    assert swiglu_width(1536) == 4096


@pytest.mark.parametrize(
    ("key", "value", "shape"),
    [
        (64, 128, (1, 64, 128)),
        (16, 8, (1, 64, 64)),
        (192, 384, (3, 256, 128)),
        (100, 96, (1, 128, 128)),
        (256, 512, (2, 256, 256)),
        (256, 320, (5, 256, 64)),
        (64, 300, (2, 64, 256)),
    ],
)
@torch.no_grad()
def test_head_fit_does_not_change_results(key, value, shape):
    fit = HeadFit(key, value, (64, 128, 256))
    assert fit.state_shape(1) == shape
    generator = torch.Generator().manual_seed(0)
    q, k, v, g, beta = (
        torch.randn(1, 6, *size, dtype=torch.float64, generator=generator)
        for size in ((2, key), (2, key), (4, value), (4,), (4,))
    )
    g, beta = -g.abs(), beta.sigmoid()
    fitted = (fit.keys(q), fit.keys(k), fit.values(v), fit.gates(g))
    assert fitted[1].shape[3:] + fitted[2].shape[3:] == shape[1:]
    for op, extra, fitted_extra in (
        (chunk_gated_delta_rule, (beta,), (fit.gates(beta),)),
        (chunk_ssd, (), ()),
    ):
        o = op(*fitted, *fitted_extra, scale=key**-0.5).o
        assert relative_error(fit.outputs(o, 4), op(q, k, v, g, *extra, scale=key**-0.5).o) < 1e-12


def test_initial_decays_and_time_steps_lie_in_their_ranges():
    torch.manual_seed(0)
    rates = init_decay_(torch.empty(20_000)).exp()
    assert 1 <= rates.min() < 1.01
    assert 15.99 < rates.max() <= 16
    assert abs(rates.mean() - 8.5) < 0.1
    steps = F.softplus(init_time_step_(torch.empty(20_000, dtype=torch.float64)))
    assert 1e-3 * (1 - 1e-9) <= steps.min() < 1.01e-3
    assert 0.099 < steps.max() <= 0.1 * (1 + 1e-9)
    assert abs(steps.log().mean() - math.log(1e-2)) < 0.02
    floored = F.softplus(init_time_step_(torch.empty(1000, dtype=torch.float64), low=1e-6, high=1e-5))
    torch.testing.assert_close(floored, torch.full_like(floored, 1e-4))


def test_initialisation_keeps_loaded_values():
    loaded = torch.full((4,), 7.0)
    loaded._is_hf_initialized = True
    assert torch.equal(init_decay_(loaded), torch.full((4,), 7.0))
    assert torch.equal(init_time_step_(loaded), torch.full((4,), 7.0))


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (5, 0), (5, 2), (1, 0), (40, 3)])
def test_mean_visible_counts_keys(window, sinks):
    for n in (1, 2, 7, 30):
        visible = [sum(window is None or t - j < window or j < sinks for j in range(t + 1)) for t in range(n)]
        assert mean_visible(n, window, sinks) == pytest.approx(sum(visible) / n)
