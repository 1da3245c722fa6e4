"""Test that operators of compiled graphs go through the launch cache like calls in eager mode."""

import inspect
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tokenmix_core.kernels.launch import caching
from tokenmix_core.ops import autograd
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, of_fields
from tokenmix_core.testing.agreement import watched

RUNS = {"forward": 0, "backward": 0, "step": 0}
ADD = []


def _sum(a: Tensor, b: Tensor, nothing: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a + 2 b, and a + b."""
    RUNS["forward"] += 1
    once, twice = torch.empty_like(a), torch.empty_like(a)
    ADD[-1][(1,)](a, b, once, len(a))
    ADD[-1][(1,)](once, b, twice, len(a))
    return twice, once


def _double(nothing: Tensor | None, x: Tensor) -> list[Tensor]:
    RUNS["backward"] += 1
    x, out = x.contiguous(), torch.empty_like(x)
    ADD[-1][(1,)](x, x, out, len(x))
    return [out]


def _step(x: Tensor, state: Tensor) -> Tensor:
    """Add x to the state."""
    RUNS["step"] += 1
    ADD[-1][(1,)](state, x, state, len(x))
    return torch.empty_like(x).copy_(state)


@pytest.fixture(scope="module")
def operators():
    """Return a + 2 b as an operator with gradients, and the step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "_LAUNCHED_ON", "cpu")
        sum_op = cached_op("tokenmix_tests::sum", _sum, lambda a, b, nothing=None: (a + b, a + b))
        double_op = cached_op("tokenmix_tests::double", _double, lambda nothing, x: [torch.empty_like(x)])
        step_op = cached_op("tokenmix_tests::step", _step, lambda x, _: torch.empty_like(x), mutates_args={"state"})

    def gradients(ctx, dtwice, donce=None):
        return dtwice, double_op(None, dtwice)[0], None

    add_twice = differentiable(sum_op, _sum, lambda ctx, inputs, output: None, gradients, outputs=1)
    return add_twice, direct_when_eager(step_op, _step, writes=1), (sum_op, double_op, step_op)


@pytest.fixture(autouse=True)
def runs(add):
    ADD.append(add)
    RUNS.update(forward=0, backward=0, step=0)
    yield RUNS
    ADD.pop()


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def test_a_compiled_graph_replays_forward_and_backward(operators, runs):
    add_twice = compiled(lambda a, b: operators[0](a.sin(), b, None)[0])
    for _ in range(4):
        a, b = (torch.randn(6, requires_grad=True) for _ in "ab")
        out = add_twice(a, b)
        torch.testing.assert_close(out, a.sin() + 2 * b)
        upstream = torch.randn(6)
        da, db = torch.autograd.grad(out, (a, b), upstream)
        torch.testing.assert_close(da, upstream * a.cos())
        torch.testing.assert_close(db, 2 * upstream)
    assert runs == {"forward": 1, "backward": 1, "step": 0}


def test_a_compiled_graph_replays_a_step(operators, runs):
    step = compiled(lambda x, state: operators[1](x, state) * 2)
    state, total = torch.zeros(6), torch.zeros(6)
    for _ in range(4):
        x = torch.randn(6)
        total = total + x
        torch.testing.assert_close(step(x, state), 2 * total)
        torch.testing.assert_close(state, total)
    assert runs["step"] == 1


@pytest.mark.slow
def test_code_that_torch_generates_replays(operators, runs):
    add_twice = compiled(lambda a, b: operators[0](a, b, None)[0] + 1, backend="inductor")
    for _ in range(3):
        a, b = torch.randn(6), torch.randn(6)
        torch.testing.assert_close(add_twice(a, b), a + 2 * b + 1)
    assert runs["forward"] == 1


def test_without_the_cache_compiled_graphs_run(operators, runs):
    add_twice = compiled(lambda a, b: operators[0](a, b, None)[0])
    a, b = torch.randn(6), torch.randn(6)
    with caching(False):
        for _ in range(3):
            torch.testing.assert_close(add_twice(a, b), a + 2 * b)
    assert runs["forward"] == 3


def test_modes_see_operators_and_not_what_they_are_made_of(operators, runs):
    a, b = torch.randn(6), torch.randn(6)
    for _ in range(3):
        out, seen = watched(lambda: operators[0](a, b, None)[0])
        torch.testing.assert_close(out, a + 2 * b)
        assert seen == ["tokenmix_tests.sum.default"]


def test_cached_operators_pass_torchs_own_checks(operators):
    sum_op, double_op, step_op = operators[2]
    for _ in range(2):
        torch.library.opcheck(sum_op, tuple(torch.randn(6, requires_grad=True) for _ in "ab"))
        torch.library.opcheck(double_op, (None, torch.randn(6)))
        torch.library.opcheck(step_op, (torch.randn(6), torch.randn(6)))


class Step(NamedTuple):
    """Arguments of a step."""

    x: Tensor
    weight: Tensor | None
    scale: float = 2.0


class Result(NamedTuple):
    """The result of a step."""

    twice: Tensor
    rest: Tensor


@of_fields
def _scaled(step: Step) -> Result:
    """Return x scaled, and the rest."""
    weight = 1.0 if step.weight is None else step.weight
    return Result(step.x * step.scale * weight, step.x - weight)


def test_a_step_of_fields_is_an_operator_of_tensors():
    assert list(inspect.signature(_scaled).parameters) == list(Step._fields)
    op = torch.library.custom_op("tokenmix_tests::scaled", _scaled, mutates_args=())
    op.register_fake(of_fields(_fake))
    schema = str(op._opoverload._schema)
    assert schema.endswith("(Tensor x, Tensor? weight, float scale=2.) -> (Tensor, Tensor)")
    x, weight = torch.randn(3), torch.randn(3)
    torch.library.opcheck(op, (x, None))
    for given in (Step(x, None), Step(x, weight, scale=3.0)):
        output = _scaled(*given)
        assert type(output) is tuple
        assert all(map(torch.equal, output, op(**given._asdict())))


class Nested(NamedTuple):
    """Arguments of the gradient of `_scaled`."""

    dtwice: Tensor
    result: Result
    step: Step


class Gradients(NamedTuple):
    """The gradients of `_scaled`."""

    dx: Tensor
    result: Result


@of_fields
def _scaled_backward(given: Nested) -> Gradients:
    """Return the gradient of x, and copies."""
    return Gradients(given.dtwice * given.step.scale, Result(*map(torch.clone, given.result)))


def test_a_step_within_a_step_stands_for_its_fields():
    op = torch.library.custom_op("tokenmix_tests::scaled_backward", _scaled_backward, mutates_args=())
    op.register_fake(_scaled_backward)
    schema = str(op._opoverload._schema)
    inputs, outputs = (
        "Tensor dtwice, Tensor twice, Tensor rest, Tensor x, Tensor? weight, float scale=2.",
        "Tensor, " * 3,
    )
    assert schema.endswith(f"({inputs}) -> ({outputs.removesuffix(', ')})")
    tensors = torch.randn(4, 3)
    dtwice, twice, rest, x = (t.clone() for t in tensors)
    torch.library.opcheck(op, (dtwice, twice, rest, x, None, 3.0))
    for scale in ({}, {"scale": 3.0}):
        wanted = scale.get("scale", 2.0) * dtwice, twice, rest
        for run in (op, _scaled_backward):
            output = run(dtwice, twice, rest, x, None, **scale)
            assert type(output) is tuple
            assert all(map(torch.equal, output, wanted))
    named = _scaled_backward(dtwice, weight=None, x=x, rest=rest, twice=twice)
    assert all(map(torch.equal, named, (2 * dtwice, twice, rest)))


class Ambiguous(NamedTuple):
    """A step with two fields of one name."""

    x: Tensor
    step: Step


class Unordered(NamedTuple):
    """A step with a field with a default that is followed by a field without one."""

    step: Step
    y: Tensor


@pytest.mark.parametrize(("step", "said"), [(Ambiguous, "duplicate parameter"), (Unordered, "non-default argument")])
def test_steps_that_are_no_signature_are_refused(step, said):
    def run(given): ...

    run.__annotations__["given"] = step
    with pytest.raises(ValueError, match=said):
        of_fields(run)


def _fake(step: Step) -> Result:
    return Result(torch.empty_like(step.x), torch.empty_like(step.x))
