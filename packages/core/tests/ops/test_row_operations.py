"""Test the contracts of operations on rows between matmuls, and the effects of layouts, dtypes and extreme values."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmix_core.kernels import Replayed, tuning
from tokenmix_core.kernels.launch import caching
from tokenmix_core.ops import delta_gates, gated_rms_norm, rms_norm, rotate, swiglu, swiglu_linear
from tokenmix_core.testing.agreement import gradients_through
from tokenmix_core.testing.launch_spies import grids
from tokenmix_core.testing.operations import Call, KernelCase, OpContract

TOKENS = (2, 9)


def random(device, dtype=torch.float32, seed=0, **shapes):
    generator = torch.Generator(device).manual_seed(seed)
    return {name: torch.randn(s, generator=generator, device=device).to(dtype) for name, s in shapes.items()}


def angles(T, half, device, rows=1, seed=0):
    rotated = random(device, seed=seed, rotated=(rows, T, half))["rotated"]
    return {"cos": rotated.cos(), "sin": rotated.sin()}


def few_programs(override):
    """Let two programs process many small blocks of rows."""
    whole = tuning.row_tile
    override(tuning, row_tile=lambda size: whole(size)._replace(BM=2))
    override(tuning, row_programs=lambda blocks: min(blocks, 2))


def z(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


# what no operation between matrix products has
ALONE = {
    "parts": "a token stands alone, without a state",
    "packed": "a token stands alone, in any document",
    "step": "a token stands alone, without a state",
    "malformed_steps": "no steps",
    "operators": "no custom ops: compilers are given the plain form",
}


class TestNorm(OpContract):
    covers = (rms_norm,)
    absent = ALONE
    forms: ClassVar = {"rows": rms_norm}
    tokens = ("x", "branch")
    shared = ("weight",)
    cases: ClassVar = {"of a sum": dict(branch=True), "alone": {}}
    lengths = (1, 2, 3)
    kernels: ClassVar = {
        "alone": KernelCase({}),
        "of a sum": KernelCase(dict(branch=True)),
        "of many": KernelCase(dict(B=1, T=5, D=5000)),
        "in walks": KernelCase(dict(branch=True), patch=few_programs, dtypes=("float32",)),
        "of many in walks": KernelCase(dict(B=1, T=5, D=5000), patch=few_programs, dtypes=("float32",)),
    }
    neighbours: ClassVar = dict(B=3, branch=True)
    on_gpu: ClassVar = {"wide rows": dict(D=256, branch=True)}
    traced: ClassVar = dict(branch=True)
    replayed: ClassVar = dict(branch=True)
    malformed: ClassVar = {
        "a weight of another size": ({"weight": z(3)}, r"weight must have shape \[20\] on cpu, got \[3\]"),
        "a branch of another size": ({"branch": z(2, 9, 5)}, "branch must have x's shape"),
        "integers": ({"x": z(2, 9, 20, dtype=torch.long)}, "x must be bfloat16.*got int64"),
        "a list": ({"x": [1.0]}, "x must be a tensor, got list"),
        "no weight": ({"weight": None}, "weight must be a tensor of shape .* got None"),
        "an unknown implementation": ({"impl": "gluon"}, "no kernels in Gluon"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, T=9, D=20, branch=False) -> Call:
        shapes = {"x": (B, T, D), "weight": (D,)} | ({"branch": (B, T, D)} if branch else {})
        return Call(random(device, dtype, seed, **shapes), {"eps": 1e-3})

    def definition(self, x, weight, branch=None, *, eps):
        total = x if branch is None else x + branch
        return rms(total, eps) * weight, total

    @staticmethod
    def results(output):
        return dict(zip(("y", "total"), output, strict=True))


class TestGatedNorm(OpContract):
    covers = (gated_rms_norm,)
    absent = ALONE
    forms: ClassVar = {"rows": gated_rms_norm}
    tokens = ("x", "z")
    shared = ("weight",)
    cases: ClassVar = {
        f"gate {gate}, {name}": dict(gate=gate, size=size, weight=weight)
        for gate in ("before", "after")
        for name, size, weight in (("one row", 24, 24), ("heads", 8, 8), ("groups", 8, 24))
    } | {"no gate, heads": dict(gate=None, size=8, weight=8)}
    lengths = (1, 2, 3)
    kernels: ClassVar = {name: KernelCase(sizes) for name, sizes in cases.items()} | {
        f"{name}, in walks": KernelCase(sizes, patch=few_programs, dtypes=("float32",)) for name, sizes in cases.items()
    }
    neighbours: ClassVar = dict(B=3)
    traced: ClassVar = dict(gate="before")
    replayed: ClassVar = dict(gate="before")
    malformed: ClassVar = {
        "rows that do not divide": ({"size": 5}, "size must divide D = 24, got 5"),
        "an unknown place": ({"gate": "beside"}, "'before' or 'after', got 'beside'"),
        "a weight of another size": ({"weight": z(3)}, r"weight must have shape \[8\] or \[24\]"),
        "a gate of another size": ({"z": z(2, 9, 5)}, "z must have x's shape"),
        "a list": ({"x": [1.0]}, "x must be a tensor, got list"),
    }

    def make(
        self, dtype=torch.float64, device="cpu", seed=0, B=2, T=9, gate: str | None = "after", size=8, weight=8
    ) -> Call:
        x = random(device, dtype, seed, x=(B, T, 24), z=(B, T, 24), weight=(weight,))
        options = {"size": size, "eps": 1e-3, "gate": gate or "after"}
        return Call(x, options) if gate else Call({n: x[n] for n in ("x", "weight")}, options | {"z": None})

    def definition(self, x, weight, z, *, size, eps, gate):
        silu = torch.ones_like(x) if z is None else z * z.sigmoid()
        parts = (x * silu if gate == "before" else x).unflatten(-1, (-1, size))
        y = rms(parts, eps).flatten(-2) * weight.repeat(x.shape[-1] // len(weight))
        return y if gate == "before" else y * silu


class TestProduct(OpContract):
    covers = (swiglu, swiglu_linear)
    absent = ALONE
    forms: ClassVar = {
        "product": lambda a, b, weight, impl=None: swiglu(a, b, impl=impl) @ weight.mT,
        "product and layer": swiglu_linear,
    }
    tokens = ("a", "b")
    shared = ("weight",)
    cases: ClassVar = {"product": {}}
    lengths = (1, 2, 3)
    kernels: ClassVar = {
        f"{form}{name}": KernelCase({}, form, patch, dtypes)
        for form in forms
        for name, patch, dtypes in (("", None, None), (", in walks", few_programs, ("float32",)))
    }
    neighbours: ClassVar = dict(B=3)
    traced: ClassVar = dict(F=20)
    replayed: ClassVar = dict(F=20)
    malformed: ClassVar = {
        "halves of unequal size": ({"b": z(2, 9, 5)}, "one shape and device"),
        "mixed dtypes": ({"b": z(2, 9, 300, dtype=torch.float16)}, "share one dtype"),
        "a list": ({"a": [1.0]}, "a must be a tensor, got list"),
        "one half alone": ({"b": None}, "b must be a tensor, got None"),
        "an unknown implementation": ({"impl": "gluon"}, "no kernels in Gluon"),
    }

    def named(self, form, name):
        return None if (form, name) == ("product", "weight") else name

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, T=9, F=300) -> Call:
        return Call(random(device, dtype, seed, a=(B, T, F), b=(B, T, F), weight=(7, F)), {})

    def definition(self, a, b, weight):
        return torch.einsum("btf,df->btd", a * a.sigmoid() * b, weight)


@pytest.mark.operation
@pytest.mark.parametrize("tokens", [(2, 9), (1, 1)])
def test_a_residual_is_added_to_the_product_and_has_its_gradient(tokens, device):
    x = random(device, a=(*tokens, 40), b=(*tokens, 40), weight=(7, 40), residual=(*tokens, 7))
    found = {}
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        given = {name: value.to(dtype).requires_grad_() for name, value in x.items()}
        (dr,) = torch.autograd.grad(swiglu_linear(**given, impl=impl).sum(), given["residual"])
        assert (dr == 1).all()
        y = swiglu_linear(**given, impl=impl)
        alone = swiglu_linear(given["a"], given["b"], given["weight"], impl=impl)
        torch.testing.assert_close(y, alone + given["residual"])
        found[impl] = [y, *torch.autograd.grad(y.square().sum(), list(given.values()))]
    for ours, exact in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_residual_of_another_shape_or_dtype_is_refused():
    x = {"a": z(2, 9, 5), "b": z(2, 9, 5), "weight": z(7, 5)}
    with pytest.raises(ValueError, match=r"residual must have shape \[2, 9, 7\]"):
        swiglu_linear(**x, residual=z(2, 9, 5))
    with pytest.raises(ValueError, match="share one dtype"):
        swiglu_linear(**x, residual=z(2, 9, 7, dtype=torch.float16))


class TestRotation(OpContract):
    covers = (rotate,)
    absent = ALONE
    forms: ClassVar = {"rows": rotate}
    tokens = ("x", "cos", "sin")
    shared = ("weight",)
    cases: ClassVar = {
        f"{name}, {places}": dict(norm=norm, rows=rows)
        for name, norm in (("rotated", False), ("normalised and rotated", True))
        for places, rows in (("positions shared", 1), ("positions by row", 2))
    }
    lengths = (1, 2, 3)
    kernels: ClassVar = {name: KernelCase(sizes, patch=few_programs) for name, sizes in cases.items()}
    neighbours: ClassVar = dict(B=3, norm=True)
    traced: ClassVar = dict(norm=True)
    replayed: ClassVar = dict(norm=True)
    malformed: ClassVar = {
        "an odd head": ({"x": z(2, 9, 3, 11)}, "even K"),
        "a sine of another length": ({"sin": z(1, 8, 6)}, "sin must have shape"),
        "positions of other rows": (dict.fromkeys(("cos", "sin"), z(3, 9, 6)), "cos B or 1 rows"),
        "a missing axis": ({"x": z(2, 9, 12)}, r"x must have shape \[B, T, H, K\], got \[2, 9, 12\]"),
        "no cosine": ({"cos": None}, "cos must be a tensor"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, T=9, rows=1, norm=False) -> Call:
        shapes = {"x": (B, T, 3, 12)} | ({"weight": (12,)} if norm else {})
        return Call(random(device, dtype, seed, **shapes), {"eps": 1e-3} | angles(T, 6, device, rows, seed))

    def definition(self, x, *, cos, sin, eps, weight=None):
        if weight is not None:
            x = rms(x, eps) * weight
        pairs = torch.complex(x[..., :6], x[..., 6:]) * torch.complex(cos, sin).unsqueeze(2)
        return torch.cat((pairs.real, pairs.imag), -1)


class TestGates(OpContract):
    covers = (delta_gates,)
    absent = ALONE
    forms: ClassVar = {"rows": delta_gates}
    tokens = ("a", "b")
    shared = ("A_log", "dt_bias")
    cases: ClassVar = {"gates": {}}
    lengths = (1, 2, 3)
    kernels: ClassVar = {
        "gates": KernelCase({}),
        "gates, in walks": KernelCase({}, patch=few_programs, dtypes=("float32",)),
    }
    neighbours: ClassVar = dict(B=3)
    traced: ClassVar = dict(HV=2)
    replayed: ClassVar = dict(HV=2)
    malformed: ClassVar = {
        "rates of other heads": ({"b": z(2, 9, 5)}, "b must have shape"),
        "a bias of other heads": ({"dt_bias": z(4)}, "dt_bias must have shape"),
        "a list": ({"a": [1.0]}, "a must be a tensor of shape .*, got list"),
        "integers": ({"A_log": z(3, dtype=torch.long)}, "A_log must be .*got int64"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, T=9, HV=3) -> Call:
        return Call(
            random(device, dtype, seed, a=(B, T, HV), b=(B, T, HV), A_log=(HV,), dt_bias=(HV,)), {"max_beta": 2.0}
        )

    def definition(self, a, b, A_log, dt_bias, *, max_beta):
        return -A_log.exp() * (1 + (a + dt_bias).exp()).log(), max_beta / (1 + (-b).exp())

    @staticmethod
    def results(output):
        return dict(zip(("g", "beta"), output, strict=True))


@pytest.mark.gpu
def test_one_capture_serves_all_batch_sizes_and_lengths(monkeypatch):
    captured, capture = [], Replayed._capture
    monkeypatch.setattr(Replayed, "_capture", lambda self, *call: captured.append(self) or capture(self, *call))

    def calls(B, T):
        given = random("cuda", torch.bfloat16, seed=T, x=(B, T, 48), z=(B, T, 48), q=(B, T, 3, 16), a=(B, T, 5))
        given |= random("cuda", torch.bfloat16, wide=(B, T, 160)) | random("cuda", w=(48,), head=(16,), rates=(5,))
        x, z, q, a, wide, w, head, rates = given.values()
        rotated = angles(T, 8, "cuda")
        yield rms_norm(x, w)
        yield rms_norm(x, w, z)
        yield (gated_rms_norm(x, z, w, size=16, gate="before"),)
        yield (gated_rms_norm(x, z, head, size=16),)
        yield (gated_rms_norm(x, wide[..., 48:96], head, size=16),)
        yield (swiglu(x, z),)
        yield (rotate(q, **rotated),)
        yield (rotate(q, **rotated, weight=head),)
        yield delta_gates(a, a.flip(1), rates, rates)

    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for _ in range(3):
                list(calls(2, 40))
            captured.clear()
            for B, T in ((1, 64), (3, 700), (5, 1), (2, 41)):
                with caching(False):
                    wanted = list(calls(B, T))
                for got, same in zip(calls(B, T), wanted, strict=True):
                    assert all(torch.equal(y, z) for y, z in zip(got, same, strict=True))
            assert not captured


def test_the_rotation_keeps_lengths_and_turns_back(device):
    x = random(device, x=(*TOKENS, 3, 12))["x"]
    rotated = angles(9, 6, device)
    y = rotate(x, **rotated, impl="triton")
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate(y, rotated["cos"], -rotated["sin"], impl="triton"), x)


def test_slices_are_read_where_they_lie(device):
    wide = random(device, wide=(*TOKENS, 72))["wide"]
    a, b, c = wide.split(24, -1)
    results = {}
    for name, (x, y, z) in {"slices": (a, b, c), "copies": (a.clone(), b.clone(), c.clone())}.items():
        leaves = [t.detach().requires_grad_() for t in (x, y, z)]
        weight = torch.ones(8, device=device, requires_grad=True)
        gated = gated_rms_norm(leaves[0], leaves[1], weight, size=8, impl="triton")
        rotated = rotate(leaves[2].unflatten(-1, (2, 12)), **angles(9, 6, device), impl="triton").flatten(2)
        out = swiglu(gated, rotated, impl="triton") + rms_norm(*leaves[:1], torch.ones_like(wide[0, 0, :24])).y
        results[name] = out, *torch.autograd.grad(out.sum(), [*leaves, weight])
    assert all(torch.equal(p, q) for p, q in zip(*results.values(), strict=True))


class Operations(TorchDispatchMode):
    """Collects the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("run", "inputs"),
    [
        ("rms_norm_kernels._run", (z(2, 5, 8), z(2, 5, 8), None, z(8), 1e-6, 8, False, torch.float32)),
        ("rms_norm_kernels._run", (z(2, 5, 8), None, z(2, 5, 8), z(8), 1e-6, 8, False, torch.float32)),
        ("swiglu_kernels.swiglu_forward", (z(2, 5, 8), z(2, 5, 8))),
        ("rotary_kernels._run", (z(2, 5, 4, 8), None, z(1, 5, 4), z(1, 5, 4), 1e-6)),
        ("gdn_gates_kernels._forward", (z(2, 5, 8), z(2, 5, 8), z(8), z(8), 1.0)),
    ],
)
def test_contiguous_rows_need_no_operation_of_torch_but_allocations(run, inputs):
    pytest.importorskip("triton")
    module, _, name = f"tokenmix_core.ops.fused.{run}".rpartition(".")
    run = getattr(import_module(module), name)
    with grids() as launched, Operations() as operations:
        run(*inputs)
    assert len(launched) == 1
    assert operations.seen == {"aten.empty.memory_format"}


@pytest.mark.parametrize("used", ["y", "total"])
def test_gradients_flow_through_either_result_of_the_sum_alone(used, device):
    x = random(device, x=(*TOKENS, 20), branch=(*TOKENS, 20), weight=(20,))
    got, expected = (gradients_through(partial(rms_norm, impl=impl), x, used) for impl in ("triton", "reference"))
    for name in x:
        torch.testing.assert_close(got[name], expected[name], msg=name)


def test_streams_branches_and_results_may_differ_in_dtype(device):
    x = random(device, x=(*TOKENS, 20), weight=(20,)) | random(device, torch.float16, branch=(*TOKENS, 20))
    leaves = [t.requires_grad_() for t in (x["x"], x["weight"], x["branch"])]
    y, total = rms_norm(*leaves, dtype=torch.float16, impl="triton")
    assert (y.dtype, total.dtype) == (torch.float16, torch.float32)
    grads = torch.autograd.grad([y, total], leaves, [torch.ones_like(y), torch.ones_like(total)])
    assert [g.dtype for g in grads] == [torch.float32, torch.float32, torch.float16]
    torch.testing.assert_close(grads[2], grads[0].half())


def test_large_rates_and_inputs_stay_finite(device):
    a = torch.tensor([[[-1e4, -30.0, 0.0, 30.0, 1e4]]], device=device)
    none = torch.zeros(5, device=device)
    leaves = [t.clone().requires_grad_() for t in (a, a, none, none)]
    for impl in ("triton", "reference"):
        g, beta = delta_gates(*leaves, impl=impl)
        torch.testing.assert_close(g[0, 0], -torch.nn.functional.softplus(a[0, 0]))
        assert all(x.isfinite().all() for x in torch.autograd.grad(g.sum() + beta.sum(), leaves))
        # a silent gate leaves nothing, and a row of zeros is no division by zero
        y = gated_rms_norm(torch.zeros_like(leaves[0]), leaves[1], none + 1, impl=impl)
        assert torch.equal(y, torch.zeros_like(y))


def test_compilers_are_given_the_plain_forms(device):
    x = random(device, x=(*TOKENS, 24), z=(*TOKENS, 24), weight=(24,))

    def run(x, z, weight):
        y, total = rms_norm(x, weight, z, impl="triton")
        return swiglu(gated_rms_norm(y, z, weight, impl="triton"), total, impl="triton").sum()

    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(run, backend=backend, fullgraph=True)(**x)
    torch.testing.assert_close(compiled, run(**x))
    assert not any("Eager" in str(node.target) for node in graphs[0].graph.nodes)
