"""The scorer's kernels for Hopper against float64, run on a CPU by the Gluon emulator."""

from __future__ import annotations

import sys
from functools import partial
from typing import NamedTuple

import pytest
import torch

from tokenmix_core.kernels import tuning
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.testing import gluon_emulator
from tokenmix_core.testing.agreement import RoundedProducts, assert_agrees, values_and_gradients
from tokenmix_core.testing.closeness import assert_within
from tokenmix_lte.ops import retention_logits
from tokenmix_lte.ops.scorer.plan import hopper_limit

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

OP = "tokenmix_lte.ops.scorer"
# channels of keys, and of each layer
CHANNELS = (32, 32, 16, 16)
CASES = {
    "more than one block": dict(T=1100),
    "heads and rows": dict(B=3, T=19, H=2),
    "dropout": dict(B=2, T=40, H=2, dropout=0.3),
    "dropout, wide": dict(T=70, channels=(64, 64, 32, 16), dropout=0.5),
    "packed": dict(T=70, cu_seqlens=torch.tensor([0, 1, 1, 30, 70])),
    "packed, many of a token": dict(T=70, cu_seqlens=torch.arange(71)),
    "padded": dict(B=2, T=26, begin=torch.tensor([0, 9])),
    "past": dict(T=40, offsets=(-4, -2, 0)),
    "one apart": dict(T=40, offsets=(-1, 0, 1)),
    "wide": dict(T=9, channels=(64, 64, 32, 16)),
}


class Scored(NamedTuple):
    logits: torch.Tensor


@pytest.fixture
def on_hopper(monkeypatch, override):
    """Run the Hopper kernels on the emulator; return the set of names of launched kernels."""
    ran = set()

    def note(name, run, *args, **options):
        ran.add(name)
        return run(*args, **options)

    (tile,) = gluon_emulator.load("tokenmix_core", "kernels.gluon.hopper")
    monkeypatch.setitem(sys.modules, tile.__name__, tile)
    for module in gluon_emulator.load(OP, "hopper.forward", "hopper.backward"):
        for name, run in list(vars(module).items()):
            if name.startswith("hopper_") and not isinstance(run, gluon_emulator.Jit):
                monkeypatch.setattr(module, name, partial(note, name, run))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # launches for a GPU of four SMs
    override(tuning, sm_count=lambda device: 4)
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    return ran


def scored(k, v, w0, b0, w1, b1, w2, b2, weight, bias, *, begin=None, impl, **options):
    """Compute logits with a fixed seed; set those before `begin` to 0."""
    torch.manual_seed(0)
    convs = (w0, b0), (w1, b1), (w2, b2)
    logits = retention_logits(k, v, convs, weight, bias, begin=begin, impl=impl, **options)
    if begin is not None:
        logits = torch.where((torch.arange(k.shape[1]) >= begin[:, None])[..., None], logits, 0.0)
    return Scored(logits)


def inputs(B=1, T=30, H=1, channels=CHANNELS):
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    K, *outs = channels
    x = {"k": randn(B, T, H, K), "v": randn(B, T, H, K)}
    for i, (C, CO) in enumerate(zip((2 * K, *outs), outs, strict=False)):
        x |= {f"w{i}": randn(H, CO, C, 3) * (2 / (3 * C)) ** 0.5, f"b{i}": randn(H, CO)}
    return x | {"weight": randn(H, outs[-1]), "bias": randn(H)}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_agree_with_the_reference(case, on_hopper):
    sizes = {name: x for name, x in CASES[case].items() if name in ("B", "T", "H", "channels")}
    options = {name: x for name, x in CASES[case].items() if name not in sizes}
    kernels, reference = (partial(scored, impl=impl, **options) for impl in ("gluon", "reference"))
    assert_agrees(kernels, reference, inputs(**sizes))
    assert on_hopper == {"hopper_scorer_forward", "hopper_scorer_recompute", "hopper_layer_backward"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_errors_are_at_most_twice_the_reference_s_with_matmuls_in_the_dtype(dtype, on_hopper):
    x = inputs(B=2, T=90)
    x = {name: y.to(dtype if name in "kv" else y.dtype) for name, y in x.items()}
    kernels, reference = (partial(scored, impl=impl, dropout=0.1) for impl in ("gluon", "reference"))
    got, upstream = values_and_gradients(kernels, x)
    exact, _ = values_and_gradients(reference, x, upstream, dtype=torch.float64)
    with RoundedProducts(dtype):
        eager, _ = values_and_gradients(reference, x, upstream)
    for name, y in got.items():
        assert_within(name, y, exact[name], eager[name], floor=4 * torch.finfo(dtype).eps)


def test_default_scorers_are_supported_and_too_large_ones_are_not():
    assert hopper_limit(64, [64, 32, 16]) is None
    assert "fit" in hopper_limit(64, [64, 64, 64])
    assert "16, 32 or 64" in hopper_limit(64, [48, 32, 16])
