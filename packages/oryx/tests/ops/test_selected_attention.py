"""Test attention for selected queries: full attention for these, zero for all others; kernels against float64."""

from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from tokenmix_core.ops import attention
from tokenmix_core.testing.agreement import assert_agrees, values_and_gradients
from tokenmix_core.testing.operations import Call, KernelCase, OpContract
from tokenmix_oryx.ops import selected_attention


class Output(NamedTuple):
    o: Tensor


def made(B, TQ, TK, HQ, H, K, V, dtype=torch.float64, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, TQ, HQ, K), "k": (B, TK, H, K), "v": (B, TK, H, V)}
    return {name: torch.randn(s, generator=g, dtype=torch.float64).to(device, dtype) for name, s in shapes.items()}


def chosen(kind, B, T, device="cpu"):
    if kind == "random tokens":
        mask = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.3
    elif kind == "runs":
        mask = (torch.arange(T).expand(B, T) // 7 + torch.arange(B)[:, None]) % 3 == 0
    else:
        mask = torch.full((B, T), kind == "all")
    return mask.to(device)


KINDS = ["random tokens", "runs", "none", "all"]


def function(mask, impl, **options):
    return lambda q, k, v: Output(selected_attention(q, k, v, mask, impl=impl, **options))


def full(mask, **options):
    """Return the specification: outputs for all queries, with zeros for those that are not selected."""
    return lambda q, k, v: Output(attention(q, k, v, impl="reference", **options).o * mask[..., None, None])


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


class TestSelectedAttention(OpContract):
    covers = (selected_attention,)
    absent: ClassVar = {"step": "a token in attention mode is decoded by core", "malformed_steps": "no steps"}
    forms: ClassVar = {"attention": selected_attention}
    eager = (None, "reference")
    tokens = ("q", "k", "v", "selected")
    past = ("k", "v")
    cases: ClassVar = {
        f"{kind}, {name}": dict(kind=kind, HQ=4, H=2, **sizes)
        for kind in KINDS
        for name, sizes in (("whole", dict(T=37)), ("fewer queries", dict(TQ=21, T=37)))
    }
    lengths = (1, 2, 63, 64, 65)
    kernels: ClassVar = {
        f"{kind}, {name}": KernelCase(dict(kind=kind, V=32, **sizes), dtypes=("float32",))
        for kind in KINDS
        for name, sizes in (
            ("whole", dict(T=70)),
            ("fewer queries", dict(TQ=21, T=50)),
            ("packed", dict(boundaries=[0, 5, 5, 40, 70])),
        )
    }
    parts: ClassVar = {kind: dict(T=30, kind=kind) for kind in KINDS}
    packed: ClassVar = {kind: dict(kind=kind, boundaries=[0, 3, 3, 4, 20, 37]) for kind in KINDS}
    neighbours: ClassVar = dict(B=3, T=5)
    traced: ClassVar = dict(B=2)
    replayed: ClassVar = dict(T=5, kind="runs")
    valid: ClassVar = dict(B=1, T=8)
    malformed: ClassVar = {
        "selection of floats": ({"selected": torch.ones(1, 8)}, "selected must be bool"),
        "marks of fewer queries": (
            {"selected": torch.ones(1, 7, dtype=torch.bool)}, r"selected must have shape \[B, TQ\]"
        ),
        "keys of another length": ({"k": z(1, 6, 1, 16)}, "v must have shape"),
        "fewer keys": (dict.fromkeys("kv", z(1, 6, 1, 16)), "at most as many as keys"),
        "a negative scale": ({"scale": -1.0}, "scale must be positive"),
        "an infinite scale": ({"scale": float("inf")}, "scale must be a finite number, got inf"),
        "a scale in words": ({"scale": "half"}, "scale must be a finite number, got 'half'"),
        "torch's kernel": ({"impl": "sdpa"}, "impl must be None or one of"),
        "heads that do not divide": (
            {"q": z(1, 8, 3, 16)} | dict.fromkeys("kv", z(1, 8, 2, 16)), "HQ must be a multiple of H"
        ),
        "boundaries beside fewer queries": (
            {"q": z(1, 7, 2, 16), "selected": torch.ones(1, 7).bool(), "cu_seqlens": torch.tensor([0, 7])},
            "as many queries as keys",
        ),
        "a list": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
    }  # fmt: skip

    def make(
        self, dtype=torch.float64, device="cpu", seed=0, B=2, T=20, TQ=None, kind="random tokens", boundaries=None,
        HQ=2,
        H=1, V=16,
    ) -> Call:  # fmt: skip
        options = {}
        if boundaries is not None:
            options["cu_seqlens"], B, T = torch.tensor(boundaries, device=device), 1, boundaries[-1]
        x = made(B, TQ or T, T, HQ, H, 16, V, dtype, device, seed)
        return Call(x, options | {"selected": chosen(kind, B, TQ or T, device)})

    def definition(self, q, k, v, *, selected):
        """Compute one selected query at a time."""
        TQ, TK, group, o = q.shape[1], k.shape[1], q.shape[2] // k.shape[2], []
        k, v = (x.repeat_interleave(group, 2) for x in (k, v))
        for i in range(TQ):
            seen = slice(i + TK - TQ + 1)
            scores = torch.einsum("bhk,bjhk->bhj", q[:, i], k[:, seen]) * q.shape[3] ** -0.5
            answer = torch.einsum("bhj,bjhv->bhv", scores.softmax(2), v[:, seen])
            o.append(answer * selected[:, i, None, None])
        return torch.stack(o, 1)

    def operators(self, device):
        from tokenmix_oryx.ops.selected_queries.autograd import selected_attention_backward_op, selected_attention_op

        x, mask = made(1, 24, 24, 1, 1, 16, 16, torch.float32, device), chosen("runs", 1, 24, device)
        inputs = (*(t.requires_grad_() for t in x.values()), mask, None, 0.25, None)
        yield selected_attention_op, inputs, "test_schema", "test_faketensor"
        with torch.no_grad():
            o, lse = selected_attention_op(*inputs)
        yield selected_attention_backward_op, (*inputs, o, lse, o), "test_schema", "test_faketensor"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["random tokens", "runs", "none", "all", "chunks"])
@pytest.mark.parametrize("form", ["whole", "fewer queries", "packed"])
def test_kernels_on_a_gpu(kind, form, dtype):
    T = 1000
    TQ, TK = (300, T) if form == "fewer queries" else (T, T)
    options = {"cu_seqlens": torch.tensor([0, 5, 5, 640, T], device="cuda")} if form == "packed" else {}
    B = 1 if form == "packed" else 2
    for sizes in ((4, 4, 128, 128), (4, 2, 64, 64), (2, 1, 96, 80)):
        x = made(B, TQ, TK, *sizes, dtype, "cuda")
        if kind == "chunks":
            draws = torch.rand(B, 8, generator=torch.Generator().manual_seed(2)) < 0.25
            mask = draws.repeat_interleave(128, 1)[:, :TQ].contiguous().cuda()
        else:
            mask = chosen(kind, B, TQ, "cuda")
        assert_agrees(function(mask, "triton", **options), full(mask, **options), x)


def test_queries_that_are_not_selected_are_never_read(device):
    x, mask = made(1, 64, 64, 1, 1, 16, 16, torch.float32, device), chosen("runs", 1, 64, device)
    clean, _ = values_and_gradients(function(mask, "triton"), x)
    x["q"] = x["q"].masked_fill(~mask[..., None, None], 1e4)
    got, _ = values_and_gradients(function(mask, "triton"), x)
    for name in clean:
        assert torch.equal(got[name], clean[name]), name
