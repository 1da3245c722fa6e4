"""Test the merge: the reference against plain equations, kernels against float64; without a GPU in the interpreter."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.testing.agreement import assert_agrees
from tokenmix_core.testing.operations import Call, KernelCase, OpContract
from tokenmix_nats_l.ops import merge_operations

KINDS = ["each", "sum", "each, no weights", "sum, no weights"]


class Merged(NamedTuple):
    y: Tensor


def merge(linear, softmax, gate, linear_norm, softmax_norm=None, logits=None, **options) -> Merged:
    return Merged(merge_operations(linear, softmax, gate, linear_norm, softmax_norm, logits, **options))


def inputs(kind, B=2, T=13, H=3, V=24, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {"linear": (B, T, H, V), "softmax": (B, T, H, V), "gate": (B, T, H * V), "linear_norm": (V,)}
    shapes |= {"softmax_norm": (V,)} if kind.startswith("each") else {}
    shapes |= {} if kind.endswith("no weights") else {"logits": (B, T, 2, H)}
    return {name: torch.randn(s, generator=generator, device=device).to(dtype) for name, s in shapes.items()}


class TestMerge(OpContract):
    covers = (merge_operations,)
    absent: ClassVar = {
        "parts": "each token is independent, without a state",
        "packed": "a token stands alone, in any document",
        "step": "a token stands alone, without a state",
        "malformed_steps": "no steps",
    }
    forms: ClassVar = {"rows": merge}
    tokens = ("linear", "softmax", "gate", "logits")
    shared = ("linear_norm", "softmax_norm")
    cases: ClassVar = {kind: dict(kind=kind) for kind in KINDS}
    lengths = (1, 2, 3)
    kernels: ClassVar = {
        f"{kind}, {name}": KernelCase(dict(kind=kind, **sizes))
        for kind in KINDS
        for name, sizes in (
            ("ragged", {}), ("one token", dict(B=1, T=1, H=2, V=64)), ("one head", dict(B=1, T=90, H=1, V=40))
        )
    }  # fmt: skip
    neighbours: ClassVar = dict(B=3, T=2)
    traced: ClassVar = {"H": 2}
    replayed: ClassVar = dict(T=2)
    malformed: ClassVar = {
        "a gate of other channels": ({"gate": torch.zeros(2, 13, 71)}, "H · V = 72 channels"),
        "mixed dtypes": ({"softmax": torch.zeros(2, 13, 3, 24, dtype=torch.float64)}, "must share one dtype"),
        "logits by head": ({"logits": torch.zeros(2, 13, 3, 2)}, "logits must have shape"),
        "a negative eps": ({"eps": -1.0}, "eps must be a finite number"),
        "a list": ({"linear": [1.0]}, "linear must be a tensor of shape .*, got list"),
        "an unknown implementation": ({"impl": "cuda"}, "impl must be"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, kind="each", **sizes) -> Call:
        return Call(inputs(kind, **sizes, dtype=dtype, device=device, seed=seed), {"eps": 1e-3})

    def definition(self, linear, softmax, gate, linear_norm, softmax_norm=None, logits=None, *, eps):
        def rms(x):
            return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

        B, T, H, _ = linear.shape
        weights = torch.ones(B, T, 2, H) if logits is None else logits.exp() / logits.exp().sum(2, keepdim=True)
        if softmax_norm is not None:
            linear, softmax = rms(linear) * linear_norm, rms(softmax) * softmax_norm
        m = weights[:, :, 0, :, None] * linear + weights[:, :, 1, :, None] * softmax
        if softmax_norm is None:
            m = rms(m) * linear_norm
        return Merged(m.flatten(2) * gate * gate.sigmoid())

    def operators(self, device):
        from tokenmix_nats_l.ops.merge.autograd import merge_backward_op, merge_forward_op

        given = (*inputs("each", T=2, dtype=torch.float32, device=device).values(), 1e-6)
        yield merge_forward_op, given
        yield merge_backward_op, (*given, torch.ones_like(given[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("V", [32, 128, 200, 1024])
def test_every_width_agrees_in_bfloat16_on_a_gpu(kind, V, device):
    x = inputs(kind, B=2, T=1001, V=V, dtype=torch.bfloat16, device=device)
    assert_agrees(partial(merge, impl="triton"), partial(merge, impl="reference"), x)


def test_norms_and_logits_may_be_kept_in_float32(device):
    x = inputs("each", dtype=torch.float16, device=device)
    x |= {name: x[name].float() for name in ("linear_norm", "softmax_norm", "logits")}
    leaves = [value.requires_grad_() for value in x.values()]
    y = merge(**x, impl="triton").y
    assert y.dtype == torch.float16
    assert [g.dtype for g in torch.autograd.grad(y.float().sum(), leaves)] == [v.dtype for v in leaves]


def test_any_layout_is_read_right(device):
    x = inputs("each", dtype=torch.float32, device=device)
    rotated = {name: v.mT.contiguous().mT if v.dim() > 1 else v for name, v in x.items()}
    torch.testing.assert_close(merge(**rotated, impl="triton"), merge(**x, impl="reference"))


def test_extreme_logits_choose_one_operation_and_stay_finite(device):
    x = inputs("each", dtype=torch.float32, device=device)
    x["logits"] = torch.tensor([1e4, -1e4], device=device).view(1, 1, 2, 1).expand(2, 13, 2, 3)
    expected = F.rms_norm(x["linear"], (24,), x["linear_norm"], 1e-6).flatten(2) * F.silu(x["gate"])
    leaves = {name: v.clone().requires_grad_() for name, v in x.items()}
    y = merge(**leaves, impl="triton").y
    torch.testing.assert_close(y, expected)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), list(leaves.values())))
