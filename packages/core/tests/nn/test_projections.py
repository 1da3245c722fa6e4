"""Test linear layers that share an input, with gradients."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tokenmix_core.nn import projections
from tokenmix_core.nn.projections import join_weights, projected, split_linear, sum_of_matmuls_op
from tokenmix_core.ops import fused_linears

pytestmark = pytest.mark.operation

# layers with few outputs, which share a GEMM, first, last and between
SIZES = ((64, 96), (6, 96, 6, 64), (3,), (16, 70, 1), (65, 63))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Let layers share GEMMs also on a CPU."""
    monkeypatch.setattr(projections, "on_gpu", lambda x: True)


def layers_of(sizes, D=24, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(D, N, bias=False, dtype=dtype, device=device) for N in sizes)


def gradients(outputs, upstream, inputs):
    return torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shape", [(2, 5), (7,), (2, 1, 3), ()])
def test_outputs_and_gradients_equal_those_of_the_layers(sizes, shape):
    layers = layers_of(sizes)
    x = torch.randn(*shape, 24, dtype=torch.float64, requires_grad=True)
    found, wanted = projected(x, *layers), [layer(x) for layer in layers]
    upstream, inputs = [torch.randn_like(y) for y in wanted], (x, *layers.parameters())
    torch.testing.assert_close(list(found), wanted)
    torch.testing.assert_close(gradients(found, upstream, inputs), gradients(wanted, upstream, inputs))


@pytest.mark.parametrize("learned", [(0,), (1,), (2,), (0, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("used", [(0, 1, 2, 3), (0, 3), (1, 2)])
def test_frozen_weights_and_unused_outputs(learned, used):
    layers = layers_of((6, 96, 6, 64))
    inputs = [torch.randn(5, 24, dtype=torch.float64), *layers.parameters()]
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i in learned)
    leaves = [inputs[i] for i in learned]

    def found(outputs):
        # an unused output adds nothing, so that a weight's gradient may be zeros or None
        loss = sum(outputs[i].square().sum() for i in used) + sum(0 * x.sum() for x in leaves)
        return torch.autograd.grad(loss, leaves)

    torch.testing.assert_close(found(projected(inputs[0], *layers)), found([layer(inputs[0]) for layer in layers]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_dtype_and_errors_equal_those_of_torch(dtype, device):
    layers = layers_of((6, 96, 6, 160), 64, torch.float32, device)
    x = torch.randn(40, 64, device=device).to(dtype).requires_grad_()
    inputs = (x, *layers.parameters())
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        found, eager = projected(x, *layers), [layer(x) for layer in layers]
    upstream = [torch.randn_like(y) for y in eager]
    assert all(y.dtype == torch.bfloat16 for y in found)
    got, plain = gradients(found, upstream, inputs), gradients(eager, upstream, inputs)
    assert [g.dtype for g in got] == [i.dtype for i in inputs]
    exact = [x.detach().double().requires_grad_(), *(w.detach().double().requires_grad_() for w in inputs[1:])]
    wanted = gradients([exact[0] @ w.T for w in exact[1:]], [y.double() for y in upstream], exact)
    for a, b, c in zip(got, plain, wanted, strict=True):
        # as many roundings as torch has, of other sums
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-6 * c.norm()


def test_checkpointing_keeps_gradients(device):
    layers = layers_of((6, 96), device=device)
    x = torch.randn(3, 24, dtype=torch.float64, device=device, requires_grad=True)
    for wanted, got in zip(
        gradients([y.sum() for y in projected(x, *layers)], None, (x, *layers.parameters())),
        gradients(
            [y.sum() for y in checkpoint(projected, x, *layers, use_reentrant=False)], None, (x, *layers.parameters())
        ),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_backward_under_autocast(device):
    layers = layers_of((64, 96, 6), dtype=torch.float32, device=device)
    x = torch.randn(5, 24, device=device, requires_grad=True)
    found, wanted = projected(x, *layers), [layer(x) for layer in layers]
    upstream, inputs = [torch.randn_like(y) for y in wanted], (x, *layers.parameters())
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        got = gradients(found, upstream, inputs)
    torch.testing.assert_close(got, gradients(wanted, upstream, inputs))


def test_outputs_may_be_overwritten(device):
    layers = layers_of((64, 96), device=device)
    x = torch.randn(2, 5, 24, dtype=torch.float64, device=device, requires_grad=True)
    found = sum(y.mul_(2).sum() for y in projected(x, *layers))
    wanted = sum(layer(x).mul_(2).sum() for layer in layers)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(wanted, x))


def test_layers_are_called_if_they_do_more_than_multiply(device, monkeypatch):
    monkeypatch.setattr(projections, "_linears", None)
    layers = layers_of((8, 80), device=device)
    x, learned = torch.randn(3, 24, dtype=torch.float64, device=device), [*layers.parameters()][1]
    # frozen layers get no gradient
    layers[0].requires_grad_(False)
    assert [y.requires_grad for y in projected(x, *layers)] == [False, True]
    learned.requires_grad_(False)
    tangent = torch.ones_like(x)
    with torch.no_grad():
        for number in (1, 7):
            assert len(projected(x, *[layers[0]] * number)) == number
    _, found = torch.func.jvp(lambda x: projected(x, *layers)[1], (x,), (tangent,))
    torch.testing.assert_close(found, tangent @ learned.T)
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        projected(x.clone().requires_grad_(), *layers)
    finally:
        hook.remove()
    assert seen
    monkeypatch.setattr(projections, "on_gpu", lambda x: False)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(projected(leaf, *layers)[1].square().sum(), leaf, create_graph=True)
    assert torch.autograd.grad(first.sum(), leaf)[0].shape == x.shape


def test_second_derivatives_raise():
    layers = layers_of((8, 80))
    x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradient"):
        torch.autograd.grad(sum(y.square().sum() for y in projected(x, *layers)), x, create_graph=True)


def test_missing_layers_give_none(device):
    (layer,) = layers_of((96,), device=device)
    x = torch.randn(3, 24, dtype=torch.float64, device=device, requires_grad=True)
    first, absent, last = projected(x, layer, None, layer)
    assert absent is None
    for y in (first, last):
        torch.testing.assert_close(y, layer(x))


def test_compiled_call_equals_the_layers(device):
    layers = layers_of((6, 96), device=device, dtype=torch.float32)
    x = torch.randn(3, 24, device=device)
    compiled = torch.compile(lambda x: projected(x, *layers), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), tuple(layer(x) for layer in layers))


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_call_shares_gemms_for_any_number_of_tokens(device, autocast):
    layers = layers_of((6, 96, 6, 160), 64, torch.float32, device)
    counter = CompileCounterWithBackend("aot_eager")

    def called(x):
        # twice, as what the first call's trace leaves behind would change the second
        return *projected(2 * x, *layers), *projected(3 * x, *layers)

    compiled = torch.compile(called, fullgraph=True, backend=counter)
    for tokens in (40, 56, 72):
        x = torch.randn(2, tokens, 64, device=device, requires_grad=True)
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            got, wanted = compiled(x), called(x)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        upstream, inputs = [torch.randn_like(y) for y in wanted], (x, *layers.parameters())
        # GEMMs on a GPU give eager calls gradients of weights that were never rounded to 16 bits; of these two terms
        # are summed, which may cancel
        atol = 2**-8 if autocast and x.is_cuda else 0
        for a, b in zip(gradients(got, upstream, inputs), gradients(wanted, upstream, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol * b.abs().max().item())
    # the second call finds that lengths change
    assert counter.frame_count <= 2
    assert any("autograd_function_apply" in str(node.target) for node in counter.graphs[0].graph.nodes)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_compiled_call_in_any_autocast_context(device, outer, inner, around):
    layers = layers_of((6, 96, 160), 64, torch.float32, device)
    x = torch.randn(8, 64, device=device, requires_grad=True)
    kind = x.device.type

    def called(x):
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=inner):
            return projected(x, *layers)

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=outer):
        got, wanted = compiled(x), called(x)
    upstream, inputs = [torch.randn_like(y) for y in wanted], (x, *layers.parameters())
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=around):
        found = gradients(got, upstream, inputs)
    for a, b in zip((*got, *found), (*wanted, *gradients(wanted, upstream, inputs)), strict=True):
        assert a.dtype == b.dtype
        # under torch.compile, autocast casts float32 GEMMs as it casts torch's layers
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-1)


def test_compiled_call_with_tensor_subclasses_equals_the_layers(device):
    layers = layers_of((6, 96), device=device, dtype=torch.float32)
    nested = torch.nested.nested_tensor(
        [torch.randn(n, 24) for n in (2, 3)], layout=torch.jagged, device=device, requires_grad=True
    )
    compiled = torch.compile(lambda x: projected(x, *layers), fullgraph=True, backend="aot_eager")
    for a, layer in zip(compiled(nested), layers, strict=True):
        torch.testing.assert_close(a.values(), layer(nested).values())


@pytest.mark.parametrize("sizes", [(64, 70, 3), (65,), (3, 2)])
@pytest.mark.parametrize("traced", [False, True])
def test_split_linear_equals_the_layer(sizes, traced):
    (layer,), x = layers_of((sum(sizes),)), torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)

    def run(x):
        return split_linear(x, layer, sizes)

    found = torch.compile(run, fullgraph=True, backend="aot_eager")(x) if traced else run(x)
    wanted = layer(x).split(list(sizes), -1)
    upstream, inputs = [torch.randn_like(y) for y in wanted], (x, *layer.parameters())
    torch.testing.assert_close(list(found), list(wanted))
    torch.testing.assert_close(gradients(found, upstream, inputs), gradients(wanted, upstream, inputs))


def test_split_linear_calls_a_layer_with_hooks():
    (layer,), x, seen = layers_of((6,)), torch.randn(2, 24, dtype=torch.float64, requires_grad=True), []
    layer.register_forward_hook(lambda *given: seen.append(given))
    assert [y.shape[-1] for y in split_linear(x, layer, (4, 2))] == [4, 2]
    assert len(seen) == 1


@pytest.mark.parametrize("terms", [1, 3])
def test_custom_operator_passes_opcheck(terms, device):
    a, b = (
        [torch.randn(shape, dtype=torch.float64, device=device) for _ in range(terms)] for shape in ((4, 3), (3, 5))
    )
    torch.testing.assert_close(sum_of_matmuls_op(a, b), sum(x @ y for x, y in zip(a, b, strict=True)))
    torch.library.opcheck(sum_of_matmuls_op, (a, b), test_utils=("test_schema", "test_faketensor"))


@torch.no_grad()
@pytest.mark.parametrize(("most", "calls"), [(24 * 6 * 8, 1), (24 * 6 * 8 - 1, 0)])
def test_large_weights_use_the_library(most, calls, monkeypatch):
    shared = []
    monkeypatch.setattr(projections, "MAX_BYTES", most)
    monkeypatch.setattr(projections, "fused_linears", lambda x, weights: shared.append(x) or fused_linears(x, weights))
    layers, x = layers_of((4, 8)), torch.randn(2, 24, dtype=torch.float64)
    torch.testing.assert_close(projected(x, *layers), tuple(layer(x) for layer in layers))
    assert len(shared) == calls


@torch.no_grad()
@pytest.mark.parametrize("sizes", SIZES)
def test_joined_weights_take_one_gemm(sizes, monkeypatch, device):
    layers, x = layers_of(sizes, device=device), torch.randn(100, 24, dtype=torch.float64, device=device)
    wanted, weights = tuple(layer(x) for layer in layers), [layer.weight.clone() for layer in layers]
    join_weights(layers)
    assert [*map(len, weights)] == [len(layer.weight) for layer in layers]
    calls, linear = [], projections.F.linear
    monkeypatch.setattr(projections.F, "linear", lambda *args: calls.append(args) or linear(*args))
    torch.testing.assert_close(projected(x, *layers), wanted)
    assert len(calls) == 1
    # values that are loaded later, layers in another order, and some of them
    for layer in layers:
        layer.weight.mul_(2)
    torch.testing.assert_close(projected(x, *reversed(layers)), tuple(2 * y for y in reversed(wanted)))
    torch.testing.assert_close(projected(x, *layers[:2]), tuple(2 * y for y in wanted[:2]))


@pytest.mark.parametrize("change", ["replaced", "converted", "gradients"])
def test_joined_weights_that_moved_are_not_read(change):
    layers, x = layers_of((64, 6, 32)), torch.randn(100, 24, dtype=torch.float64)
    join_weights(layers)
    if change == "replaced":
        layers[1].weight = nn.Parameter(torch.randn(6, 24, dtype=torch.float64))
    elif change == "converted":
        layers, x = layers.float(), x.float()
    with torch.set_grad_enabled(change == "gradients"):
        torch.testing.assert_close(projected(x, *layers), tuple(layer(x) for layer in layers))


def test_layers_with_a_bias_keep_their_weights():
    layers = nn.ModuleList(nn.Linear(24, 8) for _ in range(2))
    before = [layer.weight for layer in layers]
    join_weights(layers)
    assert all(layer.weight is x for layer, x in zip(layers, before, strict=True))


def test_weight_subclasses_call_their_layer():
    class Own(torch.Tensor):
        pass

    (layer,), x = layers_of((6,)), torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    wanted = layer(x).detach()
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Own))
    assert not projections.is_plain_linear(layer)
    found = torch.cat(split_linear(x, layer, (4, 2)), -1)
    torch.testing.assert_close(found.detach().as_subclass(torch.Tensor), wanted)
