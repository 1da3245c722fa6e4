"""A mixed call as one operation: the fused kernels against the eager layer in float64, in value and gradient."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenmix_core.nn.rotary import RotaryEmbedding, Rotation
from tokenmix_core.testing.agreement import assert_agrees
from tokenmix_oryx.ops import MixOptions, mix
from tokenmix_oryx.ops.mixing.reference import mix_reference
from tokenmix_oryx.projection import token_order


class Output(NamedTuple):
    y: Tensor


MAMBA2 = MixOptions(2, False, False, False, True, True, 1, 1e-6)
DELTA = MixOptions(2, True, True, True, False, False, 2, 1e-6)
BORDERS = [0, 15, 15, 16, 40]


def made(options, B, T, K, dtype=torch.float32, device="cpu", W=4):
    g = torch.Generator().manual_seed(0)
    H, E = options.heads, options.heads * K
    # columns beyond those that are read
    shapes = {"rows": (B * T, E), "shared": (B, T, 3 * E + 2 * H + 3), "norm_weight": (E,)}
    # one value a head of A_log, dt_bias and D (not for the delta rule): their errors are measured together
    shapes |= {"k_weight": (E, W), "v_weight": (E, W), "heads": (3 if options.turn_linear else 2, H)}
    x = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    x["heads"][0] -= 2
    return {name: t.to(device, torch.float32 if name == "heads" else dtype) for name, t in x.items()}


def modes(kind, B, T, device="cpu"):
    if kind == "tokens":
        return (torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.3).to(device)
    starts = torch.arange(T, device=device).expand(B, T)
    return {"runs": (starts // 9 + torch.arange(B, device=device)[:, None]) % 3 == 0}.get(
        kind, torch.full((B, T), kind == "attention", device=device)
    )


def functions(options, attends, K, *, places=None, cu_seqlens=None, own_angles=False):
    B, T = attends.shape

    positions = torch.arange(T, device=attends.device)[None]
    if own_angles:
        positions = positions + torch.arange(B, device=attends.device)[:, None]
    rotation = RotaryEmbedding(K, {"rope_theta": 1e4}).to(attends.device)(positions)

    def run(impl, heads, recurrence="reference", **x):
        x |= dict(zip(("A_log", "dt_bias", "D"), heads, strict=False))
        form = {"attends": attends, "rotation": rotation, "places": places, "cu_seqlens": cu_seqlens}
        if recurrence == "triton":
            return Output(mix_reference(**{"D": None} | x | form, options=options, impl="triton"))
        return Output(mix(**x, **form, options=options, impl=impl))

    return (
        lambda **x: run("triton", **x),
        lambda **x: run("reference", **x),
        lambda **x: run(None, recurrence="triton", **x),
    )


def agree(functions, x):
    """The fused kernels err at most twice as much as single operations around the recurrence's kernels.

    These sum gates in an order of their own, and the few values of gradients of one value a head show it.
    """
    ours, exact, single = functions
    assert_agrees(ours, exact, x, baseline=single)


@pytest.mark.parametrize("family", ["mamba2", "delta rule"])
@pytest.mark.parametrize("form", ["whole", "sorted", "packed"])
def test_kernels_agree_with_float64_in_value_and_gradient(family, form, device):
    options, K = (MAMBA2, 16) if family == "mamba2" else (DELTA, 64)
    B, T = 1 if form == "packed" else 2, 40
    attends = modes("runs", B, T, device)
    cu = torch.tensor(BORDERS, device=device) if form == "packed" else None
    places = None if form == "whole" else token_order(attends).places
    x = made(options, B, T, K, device=device)
    agree(functions(options, attends, K, places=places, cu_seqlens=cu, own_angles=form == "whole"), x)


@pytest.mark.parametrize("kind", ["tokens", "attention", "linear"])
def test_any_assignment_is_right(kind, device):
    attends = modes(kind, 2, 24, device)
    x = made(MAMBA2, 2, 24, 16, device=device)
    agree(functions(MAMBA2, attends, 16, places=token_order(attends).places), x)


CHANGES = {
    "SiLU after the convolution": {"silu_shared": True},
    "SiLU on attention's queries": {"silu_attention_query": True},
    "SiLU on linear's queries": {"silu_linear_query": True},
    "attention alone turned": {"turn_linear": False},
    "gate after the norm": {"gate_before": False},
    "norm by head": {"groups": 3},
    "three heads": {},
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_option_is_right(change, device):
    # three heads: no power of two
    options = MAMBA2._replace(heads=3)
    attends = modes("tokens", 1, 24, device)
    x = made(options, 1, 24, 16, device=device, W=3)
    agree(functions(options._replace(**CHANGES[change]), attends, 16), x)


def test_heads_that_ssd_has_to_widen_are_widened(device, monkeypatch):
    # as they are in float32 on a GPU
    monkeypatch.setattr("tokenmix_core.ops.ssd.autograd.needs_widening", lambda x, *sizes: min(sizes) < 64)
    attends = modes("runs", 2, 24, device)
    x = made(MAMBA2, 2, 24, 32, device=device)
    agree(functions(MAMBA2, attends, 32, places=token_order(attends).places), x)


def test_tensors_in_any_layout_are_read_right(device):
    attends = modes("runs", 1, 24, device)
    places = token_order(attends).places
    x = made(DELTA, 1, 24, 64, device=device)
    plain, *_ = functions(DELTA, attends, 64, places=places)
    strided, *_ = functions(DELTA, attends.repeat_interleave(2, 1)[:, ::2], 64, places=places.repeat_interleave(2)[::2])
    apart = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in x.items()}
    assert torch.equal(plain(**x).y, strided(**apart).y)


@pytest.mark.parametrize("family", ["mamba2", "delta rule"])
def test_memory_that_nobody_wrote_is_never_read(family, device, monkeypatch):
    options, K = (MAMBA2, 16) if family == "mamba2" else (DELTA, 64)
    # tiles without attention, and for Mamba-2 rows that no tile of attention's reaches
    T = 170 if family == "mamba2" else 70
    attends = torch.zeros(1, T, dtype=torch.bool, device=device)
    attends[:, 5:8] = True
    x = made(options._replace(heads=1), 1, T, K, device=device)
    ours, *_ = functions(options._replace(heads=1, groups=1), attends, K)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    whole = torch.autograd.grad(ours(**leaves).y.sum(), list(leaves.values()))
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _make=make, **k: _poisoned(_make(*a, **k)))
    new = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: _poisoned(new(*a, **k)))
    poisoned = torch.autograd.grad(ours(**leaves).y.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(whole, poisoned, strict=True))


def _poisoned(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["mamba2", "delta rule"])
@pytest.mark.parametrize("kind", ["tokens", "runs", "attention", "linear"])
def test_kernels_on_a_gpu(family, kind, dtype):
    # with 16 heads there are enough values of one a head to compare errors by
    options = (MAMBA2 if family == "mamba2" else DELTA)._replace(heads=16, groups=1 if family == "mamba2" else 16)
    attends = modes(kind, 2, 700, "cuda")
    x = made(options, 2, 700, 128, dtype, "cuda")
    agree(functions(options, attends, 128, places=token_order(attends).places), x)


@pytest.mark.parametrize("family", ["mamba2", "delta rule"])
def test_traced_and_recomputed_calls_give_the_same(family, device):
    options, K = (MAMBA2, 16) if family == "mamba2" else (DELTA, 64)
    attends = modes("runs", 1, 20, device)
    ours, *_ = functions(options, attends, K, places=token_order(attends).places)
    leaves = {name: t.requires_grad_() for name, t in made(options, 1, 20, K, device=device).items()}
    found = []
    recomputed = partial(checkpoint, ours, use_reentrant=False)
    for run in (ours, recomputed, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        y = run(**leaves).y
        found.append((y, *torch.autograd.grad(y.sum(), list(leaves.values()))))
    for first, *others in zip(*found, strict=True):
        assert all(torch.equal(first, x) for x in others)


def test_bad_input_is_named(device):
    x, attends = made(MAMBA2, 1, 8, 16, device=device), modes("runs", 1, 8, device)
    rotation = Rotation(*torch.ones(2, 1, 8, 8, device=device))
    A_log, dt_bias, D = x.pop("heads")
    right = x | {"A_log": A_log, "dt_bias": dt_bias, "D": D}
    right |= {"attends": attends, "rotation": rotation, "options": MAMBA2}
    for changed, message in (
        ({"shared": x["shared"][..., :-8]}, "at least 98 columns, got 95"),
        ({"k_weight": x["k_weight"][1:]}, r"k_weight must have shape \[E, W\] with E=32"),
        ({"attends": attends.long()}, "attends must be bool"),
        ({"dt_bias": None}, "dt_bias must be a tensor .*, got None"),
        ({"rows": x["rows"].double()}, "must share one dtype"),
        ({"options": MAMBA2._replace(heads=4)}, "expected 4 heads"),
        ({"options": MAMBA2._replace(groups=5)}, "multiple of groups"),
    ):
        with pytest.raises(ValueError, match=message):
            mix(**right | changed)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 32])
def test_narrow_heads_of_float32_on_a_gpu(K):
    options = MAMBA2._replace(heads=16)
    attends = modes("runs", 2, 300, "cuda")
    x = made(options, 2, 300, K, torch.float32, "cuda")
    agree(functions(options, attends, K, places=token_order(attends).places), x)
