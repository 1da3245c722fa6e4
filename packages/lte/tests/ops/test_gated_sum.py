"""The gated sum of branches: the reference against the definition, kernels against float64."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch

from tokenmix_core.testing.agreement import assert_agrees
from tokenmix_core.testing.operations import Call, KernelCase, OpContract, Results
from tokenmix_lte.ops import gated_sum

NAMES = ("compressed", "selected", "window", "gates")


def inputs(B=2, T=9, HQ=3, V=24, dtype=torch.float64, device="cpu", seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {n: torch.randn(B, T, HQ, 3 if n == "gates" else V, generator=rng).to(device, dtype) for n in NAMES}


class TestGatedSum(OpContract):
    covers = (gated_sum,)
    absent: ClassVar = {
        "parts": "tokens are independent",
        "packed": "tokens are independent",
        "step": "tokens are independent",
        "malformed_steps": "no steps",
        "operators": "no custom ops: torch.compile traces the reference",
    }
    forms: ClassVar = {"rows": gated_sum}
    tokens = NAMES
    cases: ClassVar = {"heads": {}}
    lengths = (1, 2, 3)
    kernels: ClassVar = {
        "several programs, padded channels": KernelCase(dict(T=31)),
        "heads of 64": KernelCase(dict(T=5, V=64)),
        "one head of a token": KernelCase(dict(B=1, T=1, HQ=1, V=1)),
        "wide heads": KernelCase(dict(B=1, T=2, HQ=1, V=3000)),
    }
    neighbours: ClassVar = dict(B=3)
    traced: ClassVar = dict(V=8)
    replayed: ClassVar = dict(V=8)
    malformed: ClassVar = {
        "gates of two branches": ({"gates": torch.zeros(2, 9, 3, 2)}, "gates must have shape"),
        "gates with heads first": ({"gates": torch.zeros(2, 3, 9, 3)}, "gates must have shape"),
        "a branch of other channels": ({"window": torch.zeros(2, 9, 3, 20)}, "window must have shape"),
        "mixed dtypes": ({"selected": torch.zeros(2, 9, 3, 24).half()}, "share one dtype"),
        "integers": (lambda x: {n: t.int() for n, t in x.items()}, "compressed must be bfloat16"),
        "a list": ({"compressed": [1.0]}, "compressed must be a tensor of shape .*, got list"),
        "no kernels in Gluon": ({"impl": "gluon"}, "no kernels in Gluon"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, **sizes) -> Call:
        return Call(inputs(**sizes, dtype=dtype, device=device, seed=seed), {})

    def definition(self, compressed, selected, window, gates):
        return torch.einsum("nbthv,bthn->bthv", torch.stack((compressed, selected, window)), gates)


def test_branches_with_any_strides_give_the_same_sum(device):
    x = inputs(B=1, dtype=torch.float32, device=device)
    strided = {n: t.mT.contiguous().mT if n == "window" else t for n, t in x.items()}
    # a slice of wider rows, and a layout with heads before tokens
    strided["compressed"] = torch.cat((x["compressed"], x["selected"]), -1)[..., :24]
    strided["selected"] = x["selected"].transpose(1, 2).contiguous().transpose(1, 2)
    assert_agrees(partial(_summed, impl="triton"), partial(_summed, impl="reference"), strided)
    assert torch.equal(gated_sum(**strided, impl="triton"), gated_sum(**x, impl="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("V", [32, 64, 96, 128, 256])
def test_every_width_agrees_in_bfloat16_on_a_gpu(V, device):
    x = inputs(T=1001, HQ=32, V=V, dtype=torch.bfloat16, device=device)
    assert_agrees(partial(_summed, impl="triton"), partial(_summed, impl="reference"), x)


def _summed(impl, **x):
    return Results(o=gated_sum(**x, impl=impl))
