"""The merge: the reference against plain sentences, kernels against float64; in the interpreter without a GPU."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.testing.agreement import assert_agrees
from tokenmix_nats_l.ops import merge_operations

KINDS = ["each", "sum", "each, no weights", "sum, no weights"]


class Merged(NamedTuple):
    y: Tensor


def merge(linear, softmax, gate, linear_norm, softmax_norm=None, logits=None, **options) -> Merged:
    return Merged(merge_operations(linear, softmax, gate, linear_norm, softmax_norm, logits, **options))


def inputs(kind, B=2, T=13, H=3, V=24, dtype=torch.float64, device="cpu"):
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"linear": (B, T, H, V), "softmax": (B, T, H, V), "gate": (B, T, H * V), "linear_norm": (V,)}
    shapes |= {"softmax_norm": (V,)} if kind.startswith("each") else {}
    shapes |= {} if kind.endswith("no weights") else {"logits": (B, T, 2, H)}
    return {name: torch.randn(s, generator=generator, device=device).to(dtype) for name, s in shapes.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_definition(kind):
    x = inputs(kind)

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()

    linear, softmax = x["linear"], x["softmax"]
    weights = x["logits"].exp() / x["logits"].exp().sum(2, keepdim=True) if "logits" in x else torch.ones(2, 13, 2, 3)
    if "softmax_norm" in x:
        linear, softmax = rms(linear) * x["linear_norm"], rms(softmax) * x["softmax_norm"]
    m = weights[:, :, 0, :, None] * linear + weights[:, :, 1, :, None] * softmax
    if "softmax_norm" not in x:
        m = rms(m) * x["linear_norm"]
    torch.testing.assert_close(merge(**x, eps=1e-3).y, m.flatten(2) * x["gate"] * x["gate"].sigmoid())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("shape", [{}, {"B": 1, "T": 1, "H": 2, "V": 64}, {"B": 1, "T": 90, "H": 1, "V": 40}])
def test_kernels_agree_with_the_reference_in_value_and_gradient(kind, dtype, shape, device):
    x = inputs(kind, **shape, dtype=dtype, device=device)
    assert_agrees(partial(merge, impl="triton"), partial(merge, impl="reference"), x)


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
    turned = {name: v.mT.contiguous().mT if v.dim() > 1 else v for name, v in x.items()}
    torch.testing.assert_close(merge(**turned, impl="triton"), merge(**x, impl="reference"))


def test_extreme_logits_choose_one_operation_and_stay_finite(device):
    x = inputs("each", dtype=torch.float32, device=device)
    x["logits"] = torch.tensor([1e4, -1e4], device=device).view(1, 1, 2, 1).expand(2, 13, 2, 3)
    expected = F.rms_norm(x["linear"], (24,), x["linear_norm"], 1e-6).flatten(2) * F.silu(x["gate"])
    leaves = {name: v.clone().requires_grad_() for name, v in x.items()}
    y = merge(**leaves, impl="triton").y
    torch.testing.assert_close(y, expected)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), list(leaves.values())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(2, 13, 71, dtype=torch.float64)}, "H · V = 72 channels"),
        ({"softmax": torch.zeros(2, 13, 3, 24)}, "must share one dtype"),
        ({"logits": torch.zeros(2, 13, 3, 2, dtype=torch.float64)}, "logits must have shape"),
        ({"eps": -1.0}, "eps must be a finite number"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        merge(**inputs("each") | change)
