"""The contract of the forget gates, and extreme inputs."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tokenmix_core.testing.closeness import assert_within
from tokenmix_core.testing.operations import HALF, Call, KernelCase, OpContract
from tokenmix_nha.ops import log_forget_gates


class TestForgetGates(OpContract):
    covers = (log_forget_gates,)
    absent: ClassVar = {
        "parts": "a token stands alone, without a state",
        "packed": "a token stands alone, in any document",
        "step": "a token stands alone, without a state",
        "malformed_steps": "no steps",
        "operators": "no custom ops: compilers are given the plain form",
    }
    forms: ClassVar = {"rows": log_forget_gates}
    tokens = ("f",)
    cases: ClassVar = {"gates": {}}
    lengths = (1, 2, 3)
    kernels: ClassVar = {"one tile": KernelCase({}), "tiles of both ways": KernelCase(dict(T=11, D=300))}
    neighbours: ClassVar = dict(B=3)
    traced: ClassVar = dict(D=4)
    replayed: ClassVar = dict(D=4)
    malformed: ClassVar = {
        "a list": ({"f": [1.0]}, "f must be a tensor, got list"),
        "integers": ({"f": torch.zeros(2, 9, 6, dtype=torch.long)}, "f must be .*got int64"),
        "a scalar": ({"f": torch.tensor(1.0)}, "at least one dimension"),
        "no normalizer": ({"normalizer": 0.0}, "normalizer must be positive, got 0.0"),
        "a normalizer that is not finite": ({"normalizer": float("nan")}, "normalizer must be positive, got nan"),
        "an unknown implementation": ({"impl": "gluon"}, "no kernels in Gluon"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, T=9, D=6) -> Call:
        f = torch.randn(B, T, D, generator=torch.Generator(device).manual_seed(seed), device=device)
        return Call({"f": f.to(dtype)}, {"normalizer": 8.0})

    def definition(self, f, *, normalizer):
        return -(1 + (-f).exp()).log() / normalizer

    @staticmethod
    def results(output):
        return {"log alpha": output}


@pytest.mark.operation
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_extreme_gates_and_slices_err_at_most_twice_as_much_as_torch(dtype, device):
    f = torch.tensor([-3e4, -300.0, -20.0, -1e-3, 0.0, 1e-3, 4.0, 6.0, 20.0, 80.0, 300.0, 3e4])
    # rows of 10 elements, sliced from rows of 12
    wide = torch.stack((f, f.flip(0), f, f)).to(device, dtype)[:, :10]
    results = {}
    for name, impl, x in (("exact", "reference", wide.double()), ("eager", "reference", wide), ("got", "triton", wide)):
        # detach() leaves the slice's strides as they are
        leaf = x.detach().requires_grad_()
        y = log_forget_gates(leaf, normalizer=16.0, impl=impl)
        results[name] = (
            y,
            torch.autograd.grad(y, leaf, torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(y))[0],
        )
    for i, name in enumerate(("log alpha", "df")):
        assert_within(name, results["got"][i], results["exact"][i], results["eager"][i])
    # the relative error of each element is a few roundings, even where the gate is close to 1
    torch.testing.assert_close(results["got"][0].double(), results["exact"][0], rtol=2e-6, atol=1e-30)
