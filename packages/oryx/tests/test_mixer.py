"""Test the layer against its equations, its contract in each mode, and the effect of each ablation's option."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from tokenmix_core.modeling import Span
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.mixers import MixerContract, run_mixer
from tokenmix_oryx.attention import NormedAttention
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.mixer import OryxMixer
from tokenmix_oryx.modes import Modes, resolve
from tokenmix_oryx.options import FAMILIES

WIDTH, HEADS, K = 32, 2, 8


def make(linear_mixer="mamba2", **options) -> OryxMixer:
    return OryxMixer(WIDTH, linear_mixer=linear_mixer, num_heads=HEADS, head_dim=K, **options)


def seeded(*args, **fields) -> OryxMixer:
    torch.manual_seed(0)
    mixer = make(*args, **fields)
    for module in mixer.modules():
        init_weights_(module, 0.2)
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 2)
        if mixer.D is not None:
            mixer.D.uniform_(0.5, 2)
    return mixer.double().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 19, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class _Contract(MixerContract):
    cases: ClassVar = {
        "tm": lambda: make("mamba2"),
        "tg": lambda: make("gated_delta_net"),
        "tm without conv and gate": lambda: make("mamba2", conv_size=0, output_gate=False),
        "tg with normalised keys": lambda: make("gated_delta_net", attention_l2_norm="query_key", grouped_norm=False),
    }

    def trained(self, x):
        """Return the input for training: every third token is in attention mode."""
        return {"mode": Modes(None, torch.arange(x.shape[1]).expand(len(x), -1) % 3 == 0)}


class TestNormedAttention(MixerContract):
    cases: ClassVar = {
        "norm": lambda: NormedAttention(WIDTH, num_heads=HEADS),
        "norm, convolution, gate": lambda: NormedAttention(WIDTH, num_heads=HEADS, conv_size=4, output_gate=True),
    }


@pytest.mark.parametrize(("conv_size", "output_gate"), [(0, False), (4, True)])
def test_normed_attention_equals_the_layer_in_attention_mode(conv_size, output_gate, x):
    oryx = seeded("mamba2", conv_size=conv_size, output_gate=output_gate)
    own = NormedAttention(WIDTH, num_heads=HEADS, head_dim=K, conv_size=conv_size, output_gate=output_gate).double()
    weights = {name.replace("attention_q_proj", "q_proj"): p for name, p in oryx.state_dict().items()}
    own.load_state_dict({name: weights[name] for name in own.state_dict()})
    assert relative_error(run_mixer(own, x), run_mixer(oryx, x, mode=Modes("attention"))) < 1e-12


class TestLinear(_Contract):
    inputs: ClassVar = {"mode": Modes("linear")}


class TestAttention(_Contract):
    inputs: ClassVar = {"mode": Modes("attention")}


def rotate(y: Tensor, t: int) -> Tensor:
    angle = t * 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    a, b = y.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def by_the_equations(mixer: OryxMixer, x: Tensor, attends: Tensor, family: str) -> Tensor:
    """Compute section 3 and appendix C token by token, for one sequence `[T, D]`."""
    tm, F = family == "mamba2", nn.functional
    act = (lambda y: y) if tm else F.silu
    heads = lambda y: y.view(-1, HEADS, K)  # noqa: E731
    conv = lambda y, w: sum(w[:, 3 - i] * F.pad(y, (0, 0, i, 0))[: len(y)] for i in range(4))  # noqa: E731
    q_attention, q_linear = heads(act(mixer.attention_q_proj(x))), heads(act(mixer.linear_q_proj(x)))
    k = heads(act(conv(mixer.k_proj(x), mixer.k_conv.weight)))
    v = heads(act(conv(mixer.v_proj(x), mixer.v_conv.weight)))
    z = F.silu(mixer.g_proj(x))
    dt = F.softplus(mixer.dt_proj(x) + mixer.dt_bias)
    decay = torch.exp(-mixer.A_log.exp() * dt)
    out = torch.zeros(len(x), HEADS, K, dtype=x.dtype)
    state = torch.zeros(HEADS, K, K, dtype=x.dtype)
    for t in range(len(x)):
        for h in range(HEADS):
            if tm:
                key, query = rotate(k[t, h], t), rotate(q_linear[t, h], t)
                state[h] = decay[t, h] * state[h] + torch.outer(key, dt[t, h] * v[t, h])
                linear = query @ state[h] + mixer.D[h] * v[t, h]
            else:
                key, query = F.normalize(k[t, h], dim=0), F.normalize(q_linear[t, h], dim=0)
                beta = mixer.beta_proj(x)[t, h].sigmoid()
                erased = decay[t, h] * (state[h] - beta * torch.outer(key, key @ state[h]))
                state[h] = erased + beta * torch.outer(key, v[t, h])
                linear = query @ state[h] / K**0.5
            seen = torch.stack([rotate(k[j, h], j) for j in range(t + 1)])
            weights = torch.softmax(seen @ rotate(q_attention[t, h], t) / K**0.5, 0)
            out[t, h] = weights @ v[: t + 1, h] if attends[t] else linear
    rms = lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    out = out.flatten(1)
    y = rms(out * z) * mixer.norm.weight if tm else rms(out.view(-1, HEADS, K)).flatten(1) * mixer.norm.weight * z
    return mixer.o_proj(y)


@torch.no_grad()
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("given", ["linear", "attention", "random"])
def test_layer_equals_the_papers_equations(family, given, x):
    mixer = seeded(family)
    attends = torch.rand(19, generator=torch.Generator().manual_seed(2)) < 0.5
    mode = Modes(None, attends.expand(2, -1)) if given == "random" else Modes(given)
    attends = attends if given == "random" else torch.full((19,), given == "attention")
    exact = torch.stack([by_the_equations(mixer, row, attends, family) for row in x])
    # rotary frequencies are float32; core's l2 norm adds 1e-6 under the root
    assert relative_error(run_mixer(mixer, x, mode=mode), exact) < (1e-7 if family == "mamba2" else 2e-5)


def test_no_mode_runs_the_other_mixer(x, monkeypatch):
    from tokenmix_oryx import mixer as layer
    from tokenmix_oryx import mode_attention

    def never(*args, **kwargs):
        raise AssertionError("computed for a mode that no token is in")

    tm, tg = seeded("mamba2"), seeded("gated_delta_net")
    with monkeypatch.context() as patch:
        for name in ("attention", "selected_attention", "cached_attention", "attention_decode"):
            patch.setattr(mode_attention, name, never)
        for mixer in (tm, tg):
            run_mixer(mixer, x, mode=Modes("linear"))
    with monkeypatch.context() as patch:
        patch.setattr(mode_attention, "selected_attention", never)
        for name in ("chunk_ssd", "chunk_gated_delta_rule"):
            patch.setattr(layer, name, never)
        for mixer in (tm, tg):
            run_mixer(mixer, x, mode=Modes("attention"))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_modes_share_everything_but_the_query(family, x):
    mixer = seeded(family)
    used = {}
    for mode in ("linear", "attention"):
        mixer.zero_grad()
        run_mixer(mixer, x, mode=Modes(mode)).square().sum().backward()
        used[mode] = {name for name, p in mixer.named_parameters() if p.grad is not None and p.grad.any()}
    own = {"A_log", "dt_bias", "dt_proj.weight", "linear_q_proj.weight"}
    own |= {"D"} if family == "mamba2" else {"beta_proj.weight"}
    assert used["linear"] - used["attention"] == own
    assert used["attention"] - used["linear"] == {"attention_q_proj.weight"}


def before_norm(mixer: OryxMixer, x: Tensor, mode: str, **rotation) -> Tensor:
    """Return the mixers' outputs, heads concatenated, before norm and gate."""
    seen = []
    handle = mixer.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run_mixer(mixer, x, mode=Modes(mode), **rotation)
    handle.remove()
    return seen[0]


# by switch: the family, the option, the parameters that the option removes, and the modes in which it changes the
# mixers' outputs before norm and gate
SWITCHES = {
    "shared query": ("mamba2", {"shared_query": True}, {"linear_q_proj.weight"}, {"linear"}),
    "grouped norm": ("mamba2", {"grouped_norm": True}, set(), set()),
    "full norm": ("gated_delta_net", {"grouped_norm": False}, set(), set()),
    "no convolution": ("mamba2", {"conv_size": 0}, {"k_conv.weight", "v_conv.weight"}, {"linear", "attention"}),
    "no gate": ("mamba2", {"output_gate": False}, {"g_proj.weight"}, set()),
    "rope in attention only": ("mamba2", {"rope": "attention"}, set(), {"linear"}),
    "rope in both": ("gated_delta_net", {"rope": "both"}, set(), {"linear"}),
    "unit keys": ("gated_delta_net", {"attention_l2_norm": "key"}, set(), {"attention"}),
    "unit queries and keys": ("gated_delta_net", {"attention_l2_norm": "query_key"}, set(), {"attention"}),
    "plain keys and values": ("gated_delta_net", {"kv_activation": "none"}, set(), {"linear", "attention"}),
    "plain attention query": ("gated_delta_net", {"attention_query_activation": "none"}, set(), {"attention"}),
    "plain linear query": ("gated_delta_net", {"linear_query_activation": "none"}, set(), {"linear"}),
}


@torch.no_grad()
@pytest.mark.parametrize("switch", SWITCHES)
def test_each_option_changes_only_its_part(switch, x):
    family, option, removed, changed = SWITCHES[switch]
    plain, other = seeded(family), make(family, **option).double().eval()
    weights = plain.state_dict()
    assert set(weights) - set(other.state_dict()) == removed
    assert set(other.state_dict()) <= set(weights)
    other.load_state_dict({name: p for name, p in weights.items() if name not in removed})
    for mode in ("linear", "attention"):
        same = torch.equal(before_norm(plain, x, mode), before_norm(other, x, mode))
        assert same is (mode not in changed), mode
    outputs = [run_mixer(m, x, mode=Modes("attention")) for m in (plain, other)]
    assert torch.equal(*outputs) is (changed == {"linear"})


@torch.no_grad()
def test_a_shared_query_is_one_projection(x):
    plain, shared = seeded("mamba2"), make("mamba2", shared_query=True).double()
    plain.linear_q_proj.load_state_dict(plain.attention_q_proj.state_dict())
    shared.load_state_dict({n: p for n, p in plain.state_dict().items() if n != "linear_q_proj.weight"})
    for mode in ("linear", "attention"):
        assert torch.equal(run_mixer(shared, x, mode=Modes(mode)), run_mixer(plain, x, mode=Modes(mode)))


@torch.no_grad()
def test_keys_and_values_without_convolution_are_projections(x):
    for family in FAMILIES:
        plain, bare = seeded(family), make(family, conv_size=0).double()
        for conv in (plain.k_conv, plain.v_conv):
            conv.weight.copy_(torch.tensor([0.0, 0, 0, 1]).expand_as(conv.weight))
        bare.load_state_dict({n: p for n, p in plain.state_dict().items() if "conv" not in n})
        for mode in ("linear", "attention"):
            got, exact = run_mixer(bare, x, mode=Modes(mode)), run_mixer(plain, x, mode=Modes(mode))
            assert relative_error(got, exact) < 1e-12


@torch.no_grad()
def test_outputs_without_gate_are_only_normalised(x):
    class Open(nn.Module):
        def forward(self, x):
            # silu(1.2784645…) = 1
            return torch.full((*x.shape[:-1], HEADS * K), 1.278464542761074, dtype=x.dtype)

    for family in FAMILIES:
        plain, bare = seeded(family), make(family, output_gate=False).double()
        bare.load_state_dict({n: p for n, p in plain.state_dict().items() if n != "g_proj.weight"})
        plain.g_proj = Open()
        for mode in ("linear", "attention"):
            got, exact = run_mixer(bare, x, mode=Modes(mode)), run_mixer(plain, x, mode=Modes(mode))
            assert relative_error(got, exact) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_norm_is_over_heads_or_the_whole_width(family, grouped, x):
    mixer = seeded(family, grouped_norm=grouped, output_gate=False)
    mixer.norm.weight.fill_(1.0)
    seen = []
    mixer.norm.register_forward_hook(lambda _, args, out: seen.append(out))
    run_mixer(mixer, 10 * x, mode=Modes("attention"))
    by_head = seen[0].unflatten(-1, (HEADS, K)).square().mean(-1)
    # if the norm covers the whole width, no head has a mean square of 1
    assert torch.allclose(by_head, torch.ones_like(by_head), atol=1e-3) is grouped
    assert torch.allclose(by_head.mean(-1), torch.ones_like(by_head[..., 0]), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("rope", ["both", "attention"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_rope_rotates_only_the_named_queries_and_keys(family, rope, x):
    from tokenmix_core.nn.rotary import RotaryEmbedding

    mixer = seeded(family, rope=rope)
    table = RotaryEmbedding(K, {"rope_type": "default"})
    positions = torch.arange(19)[None]
    for mode in ("linear", "attention"):
        got = [mixer(x, rotary=table(p), mode=Modes(mode))[0] for p in (positions, 3 * positions)]
        assert torch.equal(*got) is (mode == "linear" and rope == "attention")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["none", "key", "query_key"])
def test_l2_norm_removes_the_size_of_attention_inputs(kind, x):
    mixer = seeded("mamba2", attention_l2_norm=kind)
    plain = before_norm(mixer, x, "attention")
    for name, ignored in (("k_proj", kind != "none"), ("attention_q_proj", kind == "query_key")):
        weight = getattr(mixer, name).weight
        weight.mul_(3)
        assert (relative_error(before_norm(mixer, x, "attention"), plain) < 1e-9) is ignored, name
        weight.div_(3)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["linear", "attention"])
def test_query_activation_is_silu_after_the_projection(mode, x):
    name = "attention_q_proj" if mode == "attention" else "linear_q_proj"
    silu, plain = seeded("gated_delta_net"), make("gated_delta_net", **{f"{mode}_query_activation": "none"}).double()
    plain.load_state_dict(silu.state_dict())
    setattr(plain, name, nn.Sequential(getattr(plain, name), nn.SiLU()))
    for m in ("linear", "attention"):
        assert torch.equal(run_mixer(silu, x, mode=Modes(m)), run_mixer(plain, x, mode=Modes(m)))


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("conv_size", [0, 4])
def test_values_are_linear_in_their_projection_unless_activated(activation, conv_size, x):
    mixer = seeded("gated_delta_net", kv_activation=activation, conv_size=conv_size)
    plain = before_norm(mixer, x, "attention")
    mixer.v_proj.weight.mul_(-2)
    assert (relative_error(before_norm(mixer, x, "attention"), -2 * plain) < 1e-12) is (activation == "none")


def test_training_flops_follow_the_share_of_attention():
    few, many = make(attention_probability=0.0), make(attention_probability=1.0)
    convs = 2 * 2 * HEADS * K * 4
    # linear mode: a state update and a read-out; attention mode: a state update and (T + 1) / 2 keys
    assert few.mixing_flops(100) == HEADS * 4 * K * K + convs
    assert many.mixing_flops(99) == HEADS * (2 * K * K + 4 * K * 50) + convs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "off"}, "got 'off'"),
        ({"attention_probability": 2.0}, "attention_probability from 0 to 1"),
        ({"mode_chunk_size": 0}, "mode_chunk_size must be at least 1"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"head_dim": 8}, "head_dim follows from mixer_options: it is 128, got 8"),
        ({"conv_size": 3}, "unknown key 'conv_size'.*options of a layer belong in mixer_options"),
    ],
)
def test_invalid_configurations_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        OryxConfig(hidden_size=256, num_hidden_layers=1, **fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_mixer": "rwkv"}, "linear_mixer must be one of"),
        ({"rope": "neither"}, "rope must be one of"),
        ({"kv_activation": "relu"}, "kv_activation must be one of"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_heads": None, "head_dim": 24}, "head_dim must divide"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"conv_size": 1}, "conv_size must be 0 or"),
    ],
)
def test_invalid_layers_raise_in_the_configuration(options, message):
    options = {"num_heads": HEADS, "head_dim": K} | options
    with pytest.raises(ValueError, match=message):
        OryxConfig(hidden_size=WIDTH, num_hidden_layers=1, mixer_options={"oryx": options})


def test_family_defaults_apply():
    for family, choices in FAMILIES.items():
        plain, told = OryxMixer(256, linear_mixer=family), OryxMixer(256, linear_mixer=family, **choices)
        for mixer in (plain, told):
            assert (mixer.num_heads, mixer.head_dim) == (2, 128)
            assert (mixer.rope_both, mixer.norm.groups == 2) == (choices["rope"] == "both", choices["grouped_norm"])
            assert mixer.kv_activation == choices["kv_activation"]
            assert list(mixer.activations.values()) == [choices["kv_activation"]] * 2


def test_span_tokens_have_their_modes():
    assert resolve([(0, "linear"), (2, "attention")], Span(1, 4, torch.device("cpu"))).attention.tolist() == [
        [False, False, True, True]
    ]
