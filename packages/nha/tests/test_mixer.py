"""The layer against its equations, its contract with all options, and the changes of each ablation."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.nn.init import init_weights_
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.mixers import MixerContract, run_mixer
from tokenmix_nha.config import NhaConfig
from tokenmix_nha.evals import observed_shares
from tokenmix_nha.mixer import NhaMixer

WIDTH, HEADS, KV_HEADS, K, M, W, TOKENS = 32, 4, 2, 8, 5, 6, 21
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "slots": M, "window": W, "gate_normalizer": 2.0}


def make(**options) -> NhaMixer:
    return NhaMixer(WIDTH, **SIZES | options)


def seeded(**options) -> NhaMixer:
    """Return a layer whose weights depend only on their names, so that options change nothing else."""
    mixer = make(**options)
    for module in mixer.modules():
        init_weights_(module, 0.2)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4 + (1 if "norm" in name else 0))
    return mixer.double().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class _Contract(MixerContract):
    def test_gradients_reach_inputs_and_every_parameter(self, mixer, x):
        run_mixer(mixer.train(), x.requires_grad_()).square().sum().backward()
        for name, p in [("x", x), *mixer.named_parameters()]:
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            # unused gates get a gradient of zeros, because DDP waits for it
            assert p.grad.any() == (mixer.window != "full" or not name.startswith("f_proj")), name


class TestForms(_Contract):
    cases: ClassVar = {
        "slots and window": make,
        "slots alone": lambda: make(window=0),
        "full": lambda: make(window="full"),
        "full without slots": lambda: make(window="full", slots=0),
        "window alone": lambda: make(slots=0),
        "qwen's": lambda: make(qkv_bias=True, qk_norm=True, window=3),
    }


class TestAblations(_Contract):
    cases: ClassVar = {
        "no shift": lambda: make(token_shift=False),
        "fixed sum": lambda: make(fusion="fixed", long_weight=0.3),
        "learned sum": lambda: make(fusion="learned"),
        "learned sum without shift": lambda: make(fusion="learned", token_shift=False, positions="both"),
        "positions of both": lambda: make(positions="both"),
        "no positions": lambda: make(positions="none"),
        "learned positions": lambda: make(positions="learned"),
    }

    def test_gradients_reach_inputs_and_every_parameter(self, mixer, x):
        if mixer.q_positions is None:
            super().test_gradients_reach_inputs_and_every_parameter(mixer, x)
            return
        run_mixer(mixer.train(), x.requires_grad_()).square().sum().backward()
        for name, p in mixer.named_parameters():
            assert p.grad.any(), name


def rotate(y: Tensor, t: int) -> Tensor:
    angle = t * 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    a, b = y.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def by_the_equations(mixer: NhaMixer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs `[T, D]` and ω_L `[T, HQ]` of a sequence by equations 1 to 5, token by token and head by head."""
    tokens, outputs, shares = len(x), [], []
    q = mixer.q_proj(x).view(tokens, HEADS, K)
    k, v = (proj(x).view(tokens, KV_HEADS, K) for proj in (mixer.k_proj, mixer.v_proj))
    alpha = mixer.f_proj(x).view(tokens, KV_HEADS, -1).sigmoid() ** (1 / mixer.gate_normalizer)
    window = tokens if mixer.window == "full" else mixer.window
    rotates_window, rotates_slots = mixer.positions in ("window", "both"), mixer.positions == "both"
    weight = None
    if mixer.fusion == "learned":
        weight = mixer.weight_proj(x).sigmoid()
    elif mixer.fusion == "fixed":
        weight = torch.full((tokens, HEADS), mixer.long_weight, dtype=x.dtype)
    for t in range(tokens):
        heads, row = [], []
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            slots_k, slots_v = x.new_zeros(M, K), x.new_zeros(M, K)
            entered = t + 1 if not mixer.token_shift and mixer.window not in (0, "full") else max(0, t + 1 - window)
            for j in range(entered):
                a = alpha[j, g][:, None]
                slots_k = a * slots_k + (1 - a) * (rotate(k[j, g], j) if rotates_slots else k[j, g])
                slots_v = a * slots_v + (1 - a) * v[j, g]
            seen = range(max(0, t - window + 1), t + 1)
            q_slots = rotate(q[t, h], t) if rotates_slots else q[t, h]
            q_window = rotate(q[t, h], t) if rotates_window else q[t, h]
            long = slots_k @ q_slots / K**0.5
            short = [(rotate(k[j, g], j) if rotates_window else k[j, g]) @ q_window / K**0.5 for j in seen]
            short = torch.stack(short) if short else x.new_zeros(0)
            short_v = torch.stack([v[j, g] for j in seen]) if len(seen) else x.new_zeros(0, K)
            if weight is None or mixer.window in (0, "full"):
                p = torch.cat([long, short]).softmax(0)
                row.append(p[:M].sum())
                heads.append(p @ torch.cat([slots_v, short_v]))
            else:
                c = weight[t, h]
                row.append(c)
                heads.append(c * long.softmax(0) @ slots_v + (1 - c) * short.softmax(0) @ short_v)
        outputs.append(torch.cat(heads))
        shares.append(torch.stack(row))
    return mixer.o_proj(torch.stack(outputs)), torch.stack(shares)


FORMS = {
    "nha": {},
    "gsa": {"window": 0},
    "full": {"window": "full"},
    "wide": {"window": TOKENS + 3},
    "no shift": {"token_shift": False},
    "fixed": {"fusion": "fixed", "long_weight": 0.3},
    "learned": {"fusion": "learned"},
    "learned, no shift": {"fusion": "learned", "token_shift": False},
    "both": {"positions": "both"},
    "none": {"positions": "none"},
    "learned of full": {"fusion": "learned", "window": "full"},
}


@torch.no_grad()
@pytest.mark.parametrize("form", list(FORMS))
def test_the_layer_computes_the_paper_s_equations_and_its_share_of_slots(form, x):
    mixer = seeded(**FORMS[form])
    with observed_shares([mixer]) as shares:
        got = run_mixer(mixer, x)
    exact, share = zip(*(by_the_equations(mixer, row) for row in x), strict=True)
    # rotary frequencies are float32, the layer is float64
    assert relative_error(got, torch.stack(exact)) < 1e-6
    assert relative_error(shares[0][0], torch.stack(share)) < 1e-6


@torch.no_grad()
def test_learned_positions_affect_only_the_window(x):
    mixer = seeded(positions="learned")
    plain = seeded(positions="none")
    assert relative_error(run_mixer(mixer, x), run_mixer(plain, x)) > 1e-3
    for table in (mixer.q_positions, mixer.k_positions):
        table.weight.zero_()
    assert relative_error(run_mixer(mixer, x), run_mixer(plain, x)) < 1e-12
    # the slots use queries and keys without positions
    mixer = seeded(positions="learned", window=0)
    assert torch.equal(run_mixer(mixer, x), run_mixer(seeded(positions="none", window=0), x))
    # with the same vector for all positions, the order of earlier tokens has no effect; with different ones it has
    mixer = seeded(positions="learned", slots=0)
    for table in (mixer.q_positions, mixer.k_positions):
        table.weight.copy_(table.weight[:1].expand_as(table.weight))
    swapped = x.clone()
    swapped[:, [TOKENS - 2, TOKENS - 3]] = x[:, [TOKENS - 3, TOKENS - 2]]
    assert relative_error(run_mixer(mixer, swapped)[:, -1], run_mixer(mixer, x)[:, -1]) < 1e-12
    mixer = seeded(positions="learned", slots=0)
    assert relative_error(run_mixer(mixer, swapped)[:, -1], run_mixer(mixer, x)[:, -1]) > 1e-3


# options that differ from the paper's layer, and the parameters that they add or remove
ABLATIONS = {
    "without slots": ({"slots": 0}, {"f_proj.weight"}),
    "without window": ({"window": 0}, set()),
    "without token shift": ({"token_shift": False}, set()),
    "fixed sum": ({"fusion": "fixed"}, set()),
    "learned sum": ({"fusion": "learned"}, {"weight_proj.weight", "weight_proj.bias"}),
    "other window": ({"window": W - 1}, set()),
    "positions of both": ({"positions": "both"}, set()),
    "no positions": ({"positions": "none"}, set()),
    "learned positions": ({"positions": "learned"}, {"q_positions.weight", "k_positions.weight"}),
}


@torch.no_grad()
@pytest.mark.parametrize("ablation", list(ABLATIONS))
def test_an_ablation_changes_only_the_stated_parameters(ablation, x):
    fields, touched = ABLATIONS[ablation]
    paper, ablated = seeded(), seeded(**fields)
    own, theirs = dict(paper.named_parameters()), dict(ablated.named_parameters())
    assert set(own) ^ set(theirs) == touched
    for name in set(own) & set(theirs):
        assert torch.equal(own[name], theirs[name]), name
    assert relative_error(run_mixer(ablated, x), run_mixer(paper, x)) > 1e-4


@torch.no_grad()
def test_more_slots_only_enlarge_the_gates(x):
    few, many = (dict(seeded(slots=slots).named_parameters()) for slots in (M, 2 * M))
    assert {name for name in few if few[name].shape != many[name].shape} == {"f_proj.weight"}


@torch.no_grad()
def test_fusion_and_shift_do_not_affect_layers_with_one_memory(x):
    for window in (0, "full"):
        exact = run_mixer(seeded(window=window), x)
        for fields in ({"fusion": "fixed"}, {"fusion": "learned"}, {"token_shift": False}):
            assert torch.equal(run_mixer(seeded(window=window, **fields), x), exact)


@torch.no_grad()
def test_a_window_can_change_between_calls(x):
    mixer = seeded()
    for window in (0, 3, "full", TOKENS, W):
        mixer.window = window
        assert torch.equal(run_mixer(mixer, x), run_mixer(seeded(window=window), x))


def test_bytes_do_not_depend_on_the_length_unless_the_layer_is_full():
    for form, fields in FORMS.items():
        mixer = make(**fields)
        grows = mixer.state_bytes(4096) != mixer.state_bytes(1 << 20)
        assert grows == (mixer.window == "full"), form


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": -1}, "slots must be"),
        ({"window": -1}, "a window must be an integer"),
        ({"window": "half"}, "a window must be an integer"),
        ({"window": 0, "slots": 0}, "needs slots"),
        ({"window": [1, 2]}, "window must be an integer or a string"),
        ({"positions": "rope"}, "positions must be one of"),
        ({"fusion": "sum"}, "fusion must be one of"),
        ({"token_shift": 2}, "token_shift must be True or False, got 2"),
        ({"long_weight": 1.5}, "long_weight"),
        ({"gate_normalizer": 0}, "gate_normalizer"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"num_heads": 5, "num_kv_heads": 5}, "num_heads must divide hidden_size"),
    ],
)
def test_invalid_options_are_refused_by_name_when_the_configuration_is_created(options, message):
    with pytest.raises(ValueError, match=message):
        NhaConfig(hidden_size=WIDTH, num_hidden_layers=1, mixer_options={"nha": SIZES | options})
