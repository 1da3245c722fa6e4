"""Test the accelerated interpreter of Triton: equal results, and the language is restored after a launch."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tokenmix_core.testing.interpreter import hurry, steady

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _four_times_kernel(x, y, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(y + places, _twice(_twice(tl.load(x + places))))


@interpreted
def test_device_functions_give_what_they_gave_and_the_language_comes_back():
    x = torch.arange(8.0)
    for _ in range(2):
        y, before = torch.empty(8), tl.load
        _four_times_kernel[(1,)](x, y, 8)
        assert torch.equal(y, 4 * x)
        assert tl.load is before


@triton.jit
def _product_kernel(a, b, c, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    places = rows * N + columns
    tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places), tl.load(c + places)))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_are_rounded_once_wherever_a_row_stands(dtype):
    steady()
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (0, 1))
    c = torch.ones(32, 32)
    _product_kernel[(1,)](a, b, c, 32)
    assert torch.equal(c, (a.double() @ b.double()).float() + 1)


def test_an_interpreter_built_otherwise_keeps_its_products():
    interpreter = SimpleNamespace(InterpreterBuilder=SimpleNamespace())
    steady(interpreter)
    assert not vars(interpreter.InterpreterBuilder)


def test_the_language_is_replaced_once_a_launch():
    calls = []

    def replace(fn):
        calls.append(fn)
        return SimpleNamespace(restore=lambda: calls.append("restored"))

    interpreter = SimpleNamespace(_patch_lang=replace)
    hurry(interpreter)
    for _ in range(2):
        scope = interpreter._patch_lang(_twice.fn)
        # patch also for a device function
        interpreter._patch_lang(_twice.fn).restore()
        scope.restore()
    assert calls == [_twice.fn, "restored"] * 2


def test_an_interpreter_that_does_not_say_what_it_replaced_stays_as_it_is():
    calls = []
    interpreter = SimpleNamespace(_patch_lang=calls.append)
    hurry(interpreter)
    for _ in range(3):
        interpreter._patch_lang(_twice.fn)
    assert len(calls) == 3
    hurry(SimpleNamespace())
