"""Test that cuDNN, which makes a plan for every shape, runs if a shape recurs."""

import pytest
import torch

from tokenmix_core.ops.softmax_attention import backends, cudnn_plans
from tokenmix_core.ops.softmax_attention.backends import OURS, by_cudnn
from tokenmix_core.ops.softmax_attention.cudnn_plans import kernels_before_plan
from tokenmix_core.ops.softmax_attention.implementations import load
from tokenmix_core.ops.softmax_attention.types import Mask, call_of

MASK = Mask(True, None, 0)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Reset the counts, on a device that has kernels."""
    monkeypatch.setattr(cudnn_plans, "limit", lambda impl, call: None)
    cudnn_plans.reset()
    yield
    cudnn_plans.reset()


def inputs(T):
    return [torch.zeros(1, T, 2, 8) for _ in range(3)]


def test_our_kernels_run_until_a_shape_has_recurred():
    found = [kernels_before_plan(*inputs(200), MASK) for _ in range(cudnn_plans._CALLS + 5)]
    assert found == [OURS] * cudnn_plans._CALLS + [None] * 5


def test_lengths_that_do_not_recur_get_no_plan_and_are_dropped():
    for T in range(100, 400):
        for _ in range(24):
            assert kernels_before_plan(*inputs(T), MASK) == OURS
    assert len(cudnn_plans._calls) == cudnn_plans._SHAPES


def test_shapes_that_take_turns_are_counted_apart():
    for _ in range(cudnn_plans._CALLS):
        for T in (100, 200, 300):
            assert kernels_before_plan(*inputs(T), MASK) == OURS
    for T in (100, 200, 300):
        assert kernels_before_plan(*inputs(T), MASK) is None


def test_what_our_kernels_cannot_do_is_cudnns_at_once(monkeypatch):
    monkeypatch.setattr(cudnn_plans, "limit", lambda impl, call: "cannot")
    assert kernels_before_plan(*inputs(200), MASK) is None


def test_gradients_behind_our_kernels_are_ours_where_cudnn_would_lead(monkeypatch):
    monkeypatch.setattr(backends, "cudnn_heads", lambda: 256)
    monkeypatch.setattr(backends, "_is_for_flash_attention_4", lambda call: False)
    q, k, v = (torch.zeros(2, 8192, 16, 128, dtype=torch.bfloat16) for _ in range(3))
    call = call_of(q, k, v, MASK, False)
    assert backends.backward_impl(None, call, False) == "sdpa"
    assert backends.backward_impl(OURS, call, False) == OURS
    assert by_cudnn(None, q, k, v, MASK, False)
    assert by_cudnn("sdpa", q, k, v, MASK, False)
    assert not by_cudnn(None, q, k, v, Mask(True, 100, 0), False)
    assert not by_cudnn(None, q[..., :64], k[..., :64], v[..., :64], MASK, False)
    ours, default = (load(x) for x in (OURS, None))
    assert ours.forward.keywords == default.forward.keywords
    assert ours.backward.keywords == default.backward.keywords
