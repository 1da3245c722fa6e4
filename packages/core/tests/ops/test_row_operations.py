"""What lies between matrix products, row by row: kernels against float64; in the interpreter without a GPU."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.ops import delta_gates, gated_rms_norm, rms_norm, rotate, swiglu, swiglu_linear
from tokenmix_core.testing.agreement import assert_agrees, gradients_through


class Output(NamedTuple):
    y: Tensor


def single(function, **options):
    """The function with a named result."""
    return lambda **x: Output(function(**x, **options))


def random(device, dtype=torch.float32, **shapes):
    generator = torch.Generator(device).manual_seed(0)
    return {name: torch.randn(s, generator=generator, device=device).to(dtype) for name, s in shapes.items()}


def angles(T, half, device, rows=1):
    turned = random(device, turned=(rows, T, half))["turned"]
    return {"cos": turned.cos(), "sin": turned.sin()}


TOKENS = (2, 9)
CASES = {
    "norm": (lambda **o: lambda **x: Output(rms_norm(**x, **o).y), {"x": (*TOKENS, 20), "weight": (20,)}),
    "norm of a sum": (
        lambda **o: lambda **x: rms_norm(**x, **o),
        {"x": (*TOKENS, 20), "branch": (*TOKENS, 20), "weight": (20,)},
    ),
    "norm of many": (lambda **o: lambda **x: Output(rms_norm(**x, **o).y), {"x": (1, 5, 5000), "weight": (5000,)}),
    **{
        f"gate {gate}, {name}": (
            partial(single, gated_rms_norm, gate=gate, size=size),
            {"x": (*TOKENS, 24), "z": (*TOKENS, 24), "weight": (weight,)},
        )
        for gate in ("before", "after")
        for name, size, weight in (("one row", 24, 24), ("heads", 8, 8), ("groups", 8, 24))
    },
    "no gate, heads": (partial(single, gated_rms_norm, z=None, size=8), {"x": (*TOKENS, 24), "weight": (8,)}),
    "product": (partial(single, swiglu), {"a": (*TOKENS, 300), "b": (*TOKENS, 300)}),
    "product and layer": (
        partial(single, swiglu_linear),
        {"a": (*TOKENS, 300), "b": (*TOKENS, 300), "weight": (7, 300)},
    ),
    "gates": (
        lambda **o: partial(delta_gates, max_beta=2.0, **o),
        {"a": (*TOKENS, 3), "b": (*TOKENS, 3), "A_log": (3,), "dt_bias": (3,)},
    ),
}


@pytest.fixture
def few_programs(monkeypatch):
    """Two programs walk many small blocks of rows."""
    whole = tuning.row_tile
    monkeypatch.setattr(tuning, "row_tile", lambda size: whole(size)._replace(BM=2))
    monkeypatch.setattr(tuning, "row_programs", lambda blocks: min(blocks, 2))


@pytest.mark.parametrize("case", CASES)
def test_walks_over_many_blocks_agree_with_the_reference(case, device, few_programs):
    make, shapes = CASES[case]
    assert_agrees(make(impl="triton"), make(impl="reference"), random(device, **shapes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_reference(case, dtype, device):
    make, shapes = CASES[case]
    assert_agrees(make(impl="triton"), make(impl="reference"), random(device, dtype, **shapes))


@pytest.mark.parametrize("rows", [1, 2], ids=["positions shared", "positions by row"])
@pytest.mark.parametrize("norm", [False, True], ids=["turned", "normalised and turned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_rotation_agrees_with_the_reference(dtype, norm, rows, device, few_programs):
    x = random(device, dtype, x=(*TOKENS, 3, 12), **({"weight": (12,)} if norm else {}))
    turned = angles(9, 6, device, rows)
    kernels, reference = (single(rotate, **turned, impl=impl) for impl in ("triton", "reference"))
    assert_agrees(kernels, reference, x)


def test_the_rotation_keeps_lengths_and_turns_back(device):
    x = random(device, x=(*TOKENS, 3, 12))["x"]
    turned = angles(9, 6, device)
    y = rotate(x, **turned, impl="triton")
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotate(y, turned["cos"], -turned["sin"], impl="triton"), x)


def test_slices_are_read_where_they_lie(device):
    wide = random(device, wide=(*TOKENS, 72))["wide"]
    a, b, c = wide.split(24, -1)
    results = {}
    for name, (x, y, z) in {"slices": (a, b, c), "copies": (a.clone(), b.clone(), c.clone())}.items():
        leaves = [t.detach().requires_grad_() for t in (x, y, z)]
        weight = torch.ones(8, device=device, requires_grad=True)
        gated = gated_rms_norm(leaves[0], leaves[1], weight, size=8, impl="triton")
        turned = rotate(leaves[2].unflatten(-1, (2, 12)), **angles(9, 6, device), impl="triton").flatten(2)
        out = swiglu(gated, turned, impl="triton") + rms_norm(*leaves[:1], torch.ones_like(wide[0, 0, :24])).y
        results[name] = out, *torch.autograd.grad(out.sum(), [*leaves, weight])
    assert all(torch.equal(p, q) for p, q in zip(*results.values(), strict=True))


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


def two(*sizes):
    return [torch.zeros(1, 2, n) for n in sizes]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(*two(4), torch.ones(3)), r"weight must have shape \[4\] on cpu, got \[3\]"),
        (lambda: rms_norm(two(4)[0], torch.ones(4), two(5)[0]), "branch must have x's shape"),
        (lambda: rms_norm(two(4)[0].long(), torch.ones(4)), "x must be bfloat16.*got int64"),
        (lambda: gated_rms_norm(*two(6, 6), torch.ones(6), size=4), "size must divide D = 6, got 4"),
        (lambda: gated_rms_norm(*two(6, 6), torch.ones(6), gate="beside"), "'before' or 'after', got 'beside'"),
        (lambda: gated_rms_norm(*two(6, 6), torch.ones(3)), r"weight must have shape \[6\]"),
        (lambda: swiglu(*two(4, 5)), "one shape and device"),
        (lambda: swiglu_linear(*two(4, 4), torch.ones(3, 5)), r"weight must have shape \[D, 4\]"),
        (lambda: swiglu(*two(4, 4), impl="gluon"), "no kernels in Gluon"),
        (lambda: rotate(torch.zeros(1, 2, 1, 3), *two(1, 1)), "even K"),
        (lambda: rotate(torch.zeros(1, 2, 1, 4), *two(2, 3)), "sin must have shape"),
        (lambda: rotate(torch.zeros(3, 2, 1, 4), *(torch.zeros(2, 2, 2) for _ in "cs")), "cos B or 1 rows"),
        (lambda: delta_gates(*two(2, 3), torch.ones(2), torch.ones(2)), "b must have shape"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
