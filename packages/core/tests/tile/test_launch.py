"""Launches by one look-up, compiled together."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tokenmix_core.tile.launch import cached_launch, compiled_together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cached_launch
@triton.jit
def _double(x, ADD: tl.constexpr):
    p_x = x + tl.arange(0, 16)
    tl.store(p_x, 2 * tl.load(p_x) + ADD)


def test_launches_keep_their_order_and_wait_for_the_end_of_the_block():
    x = torch.ones(16, device=DEVICE)
    for repetition in (1, 2):
        with compiled_together() as launch:
            launch(_double, (1,), x, ADD=1)
            launch(_double, (1,), x, ADD=0)
            assert (x == (1 if repetition == 1 else 6)).all()
        assert (x == (6 if repetition == 1 else 26)).all()


@pytest.mark.gpu
def test_a_kernel_that_fails_to_compile_beside_others_is_compiled_by_itself(monkeypatch):
    x = torch.ones(16, device=DEVICE)
    kernel, failed = _double.fn, []
    # its compiler is there once its cache has been asked for
    assert kernel.device_caches[torch.cuda.current_device()] is not None
    compiles = kernel.compile

    def fails_once(*args, **options):
        if not failed:
            failed.append(args)
            raise RuntimeError("not now")
        return compiles(*args, **options)

    monkeypatch.setattr(kernel, "compile", fails_once)
    with compiled_together() as launch:
        launch(_double, (1,), x, ADD=2)
        launch(_double, (1,), x, ADD=3)
    assert failed
    assert (x == 11).all()
