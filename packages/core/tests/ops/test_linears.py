"""Several linear layers of one input: each weight's product, by one launch, wherever it is taken."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from tokenmix_core.nn import projections
from tokenmix_core.nn.projections import output_linear, projected
from tokenmix_core.ops import fused_linears, swiglu_linear
from tokenmix_core.ops.fused import gemv
from tokenmix_core.ops.fused import gemv_kernel as kernel
from tokenmix_core.testing.closeness import assert_within
from tokenmix_core.testing.operations import HALF, Call, KernelCase, OpContract, Results

SIZES = (20, 3, 16)


def products(x, w0, w1, w2, impl=None):
    """Return the products by name."""
    return Results({f"y{i}": y for i, y in enumerate(fused_linears(x, [w0, w1, w2], impl=impl))})


class TestLinears(OpContract):
    covers = (fused_linears,)
    absent: ClassVar = {
        "lengths": "a row stands alone: sizes of tiles are among the kernels' cases",
        "parts": "a row stands alone, without a state",
        "packed": "rows belong to no sequence",
        "step": "it is of one token",
        "malformed_steps": "no steps",
        "traced": "it has no axis of tokens: a graph of its own is below",
    }
    forms: ClassVar = {"together": products}
    differentiable = False
    dtypes = ("half",)
    tokens = ("x",)
    shared = ("w0", "w1", "w2")
    cases: ClassVar = {"three weights": dict(B=3, D=5)}
    kernels: ClassVar = {
        "one row": KernelCase(dict(B=1, D=300)),
        "one long row": KernelCase(dict(B=1, D=4200)),
        "more rows than sixteen": KernelCase(dict(B=17, D=64)),
    }
    # the kernel takes up to 64 rows
    long = (17, 64)
    neighbours: ClassVar = dict(B=3, D=16)
    replayed: ClassVar = dict(B=1, D=16)
    malformed: ClassVar = {
        "a weight of other columns": ({"w1": torch.zeros(3, 4)}, r"weights\[1\] must have shape \[N, D\] with D=5"),
        "another dtype": ({"w2": torch.zeros(16, 5).double()}, "dtype"),
        "a list": ({"x": [1.0]}, "x must be a tensor of shape .*, got list"),
        "integers": ({"x": torch.zeros(3, 5).long()}, "x must be"),
        "kernels for many rows": ({"x": torch.zeros(65, 5), "impl": "triton"}, "takes up to 64 rows, got 65"),
        "kernels for float32": ({"x": torch.zeros(2, 5), "impl": "triton"}, "x must be bfloat16, float16"),
    }
    valid: ClassVar = dict(B=3, D=5)

    def named(self, form, name):
        return name if name == "x" else f"weights[{name[1]}]"

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, D=16, T=None) -> Call:
        rng = torch.Generator().manual_seed(seed)
        shapes = {"x": (T or B, D)} | {f"w{i}": (N, D) for i, N in enumerate(SIZES)}
        # values that all dtypes can represent
        drawn = {name: torch.randn(shape, generator=rng).half() for name, shape in shapes.items()}
        return Call({name: t.to(device, dtype) for name, t in drawn.items()}, {})

    def definition(self, x, w0, w1, w2):
        weights = enumerate((w0, w1, w2))
        return Results({f"y{i}": torch.stack([(row * w).sum(1) for row in x]) for i, w in weights})

    def floor(self, name, eps):
        # sums of hundreds of products are computed in another order
        return 2 * eps

    def operators(self, device):
        from tokenmix_core.ops.fused.gemv_kernel import fused_linears_op

        x, *weights = self.make(HALF, device).tensors.values()
        yield fused_linears_op, (x, *weights, None, None, None), "test_schema", "test_faketensor"


@pytest.mark.operation
def test_one_graph_serves_all_numbers_of_rows(device):
    impl = "triton" if device == "cuda" else "reference"
    weight, other = (torch.randn(N, 16, device=device, dtype=HALF) for N in (4, 5))
    compiled = torch.compile(
        lambda x: fused_linears(x, [weight, other], impl=impl), fullgraph=True, backend="aot_eager"
    )
    for rows in (2, 3, 5):
        x = torch.randn(rows, 16, device=device, dtype=HALF)
        torch._dynamo.mark_dynamic(x, 0)
        for y, wanted in zip(compiled(x), fused_linears(x, [weight, other], impl=impl), strict=True):
            torch.testing.assert_close(y, wanted)


@torch.no_grad()
@pytest.mark.parametrize(("rows", "dtype", "multiplied"), [
    (3, torch.float32, 4), (7, torch.float32, 7), (4, torch.float32, 4), (3, torch.float64, 3),
])  # fmt: skip
def test_row_counts_that_are_slow_in_cublas_get_one_row_more(monkeypatch, rows, dtype, multiplied):
    made = []

    def linear(x, weight, bias=None):
        made.append(len(x))
        return x @ weight.t()

    monkeypatch.setattr(gemv.F, "linear", linear)
    monkeypatch.setattr(gemv, "on_gpu", lambda x: True)
    layers = [nn.Linear(8, N, bias=False, dtype=dtype) for N in (4, 2)]
    x = torch.randn(rows, 1, 8, dtype=dtype)
    for layer, y in zip(layers, projected(x, *layers), strict=True):
        torch.testing.assert_close(y, x @ layer.weight.t())
    torch.testing.assert_close(output_linear(x, layers[0]), x @ layers[0].weight.t())
    assert made == [multiplied] * 3


@torch.no_grad()
@pytest.mark.parametrize("with_residual", [False, True])
def test_swiglu_of_slow_row_counts_equals_its_reference(monkeypatch, device, with_residual):
    a, b, weight = (torch.randn(n, 8, device=device) for n in (3, 3, 4))
    residual = torch.randn(3, 4, device=device) if with_residual else None
    wanted = swiglu_linear(a, b, weight, residual, impl="reference")
    monkeypatch.setattr(gemv, "on_gpu", lambda x: True)
    torch.testing.assert_close(swiglu_linear(a, b, weight, residual, impl="triton"), wanted)


def test_numbers_of_weights_are_bounded():
    x, weight = torch.zeros(1, 4), torch.zeros(2, 4)
    for number in (0, 7):
        with pytest.raises(ValueError, match=f"fused_linears: expected one to 6 weights, got {number}"):
            fused_linears(x, [weight] * number)


@pytest.fixture
def launches(monkeypatch):
    """Return a list with the number of calls of `fused_linears`."""
    calls = []
    monkeypatch.setattr(projections, "fused_linears", lambda *args: calls.append(args) or fused_linears(*args))
    return calls


@torch.no_grad()
def test_layers_of_few_tokens_are_one_call_and_give_what_they_give(launches, device):
    torch.manual_seed(0)
    layers = [nn.Linear(8, N, bias=False, device=device) for N in (4, 2)]
    for shape, number in (((3, 8), 1), ((2, 1, 8), 2), ((65, 8), 2)):
        x = torch.randn(shape, device=device)
        for y, layer in zip(projected(x, *layers), layers, strict=True):
            torch.testing.assert_close(y, layer(x))
        assert len(launches) == number


@torch.no_grad()
def test_one_layer_of_one_token_is_one_call_and_gives_what_it_gives(launches, device):
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False, device=device)
    for shape, number in (((1, 8), 1), ((1, 1, 8), 2), ((2, 8), 2)):
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(output_linear(x, layer), layer(x))
        assert len(launches) == number
    biased = nn.Linear(8, 4, device=device)
    torch.testing.assert_close(output_linear(x[:1], biased), biased(x[:1]))
    with torch.enable_grad():
        assert output_linear(x[:1], layer).requires_grad
    assert len(launches) == 2


@pytest.mark.operation
@pytest.mark.parametrize("columns", [40, 600, 5000])
def test_a_product_behind_a_swiglu_of_one_token_errs_no_more_than_the_reference(columns, device):
    rng = torch.Generator().manual_seed(0)
    x = [torch.randn(n, columns, generator=rng).to(device, HALF) for n in (1, 1, 21)]
    exact = swiglu_linear(*(t.double() for t in x))
    found = swiglu_linear(*x, impl="triton")
    assert_within("y", found, exact, swiglu_linear(*x, impl="reference"), floor=2 * torch.finfo(HALF).eps)
    # what is added meets the rounded product
    residual = torch.randn(1, 21, generator=rng).to(device, HALF)
    assert torch.equal(swiglu_linear(*x, residual, impl="triton"), residual + found)


@torch.no_grad()
def test_no_layers_are_no_call(launches):
    assert projected(torch.zeros(1, 8), None, None) == (None, None)
    assert not launches


class OfAnotherClass(torch.Tensor):
    """A weight of another class, as quantised layers have."""


def test_layers_are_called_where_they_do_more_or_are_watched(launches, device):
    x = torch.randn(3, 8, device=device)
    plain, biased, watched = (nn.Linear(8, 4, bias=bias, device=device) for bias in (False, True, False))
    seen = []
    watched.register_forward_hook(lambda *_: seen.append(1))
    for layers in ((plain, biased), (plain, watched), (plain, nn.Sequential(plain))):
        with torch.no_grad():
            projected(x, *layers)
    projected(x, plain, plain)
    quantised = nn.Linear(8, 4, bias=False, device=device)
    quantised.weight = nn.Parameter(quantised.weight.detach().as_subclass(OfAnotherClass), requires_grad=False)
    with torch.no_grad():
        projected(x, plain, quantised)
    with torch.no_grad(), torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert projected(x, plain, plain)[0].dtype == torch.bfloat16
    assert not launches
    assert seen


class Told:
    """A kernel that records how it is launched."""

    def __init__(self):
        self.options = []

    def __getitem__(self, grid):
        return lambda **options: self.options.append(options)


def test_a_weight_that_is_copied_for_a_call_is_not_read_before_the_copy_has_ended(monkeypatch):
    told = Told()
    monkeypatch.setattr(kernel, "one_row_kernel", told)
    x, wide = torch.zeros(1, 40), torch.zeros(40, 12)
    for weights in ([wide.t()], [wide.t().contiguous()], [wide.t().contiguous(), wide.t()]):
        kernel.fused_linears_forward(x, weights)
    # without an option, the launcher decides about PDL
    assert [options.get("PDL") for options in told.options] == [False, None, False]
    assert all(options["w0"].is_contiguous() for options in told.options)


@pytest.mark.operation
def test_weights_that_lie_apart_are_multiplied_as_others(device):
    rng = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(*shape, generator=rng).to(device, HALF) for shape in ((1, 40), (40, 12)))
    found, wanted = (fused_linears(x, [w], impl="triton")[0] for w in (wide.t(), wide.t().contiguous()))
    assert torch.equal(found, wanted)
