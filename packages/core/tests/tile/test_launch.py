"""Launches by one look-up, compiled together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tokenmix_core.tile import driver
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


@cached_launch
@triton.jit
def _write(out, x, nothing, count, long, small, one, flag, factor, ADD: tl.constexpr, ALSO: tl.constexpr):
    o_i = tl.arange(0, 16)
    b = tl.load(x + o_i, mask=o_i < count, other=0.0) * factor
    b += (long // 1000).to(tl.float32) + small + 2 * one + ADD
    if nothing is not None:
        b += tl.load(nothing)
    if flag:
        b += 100
    tl.store(out + tl.program_id(0) * 16 + o_i, b)


def run(call, args, stream=None):
    stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
    call(*(stream if x is driver.STREAM else x for x in args))


@pytest.mark.gpu
@pytest.mark.parametrize("flag", [True, False])
def test_a_bound_kernel_takes_arguments_of_every_kind(flag):
    x = torch.randn(16, device="cuda")
    wanted, got = torch.zeros(2, 32, device="cuda")
    args = (x, None, 5, 1 << 40, -3, 1, flag, 0.37)
    for out in (wanted, wanted):
        _write[(2,)](out, *args, ADD=7, ALSO=torch.float32)
    call, taken = _write.driver_call((2,), (got, *args), {"ADD": 7, "ALSO": torch.float32})
    run(call, [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in taken])
    assert wanted.abs().sum() > 0
    assert torch.equal(got, wanted)


class Launched:
    """A compiled kernel that launches nothing; what its launchers, in Python and in C, were given."""

    def __init__(self, **metadata):
        self.given, self.given_to_c = [], []
        self.function, self.packed_metadata = 7, (4, 1, 100)
        self.run = lambda *args: self.given.append(args)
        self.run.launch = lambda *args: self.given_to_c.append(args)
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, True
        self.run.arg_annotations, self.run.kernel_signature = "annotations", b"signature"
        usual = {"global_scratch_size": 0, "profile_scratch_size": 0, "target": SimpleNamespace(backend="cuda")}
        self.metadata = SimpleNamespace(**{**usual, **metadata})


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ((3, 6), (2, 3, 1, 9, 7, False, True, None, None, (4, 1, 100), None, None, None, 512, 5)),
        (
            (3, 7),
            (2, 3, 1, 9, 7, False, True, (4, 1, 100), *(None,) * 5, "annotations", b"signature", (512, 5)),
        ),
    ],
)
def test_kernels_are_launched_by_tritons_launcher_in_c(monkeypatch, version, wanted):
    monkeypatch.setattr(driver, "_VERSION", version)
    kernel = Launched()
    run(*driver.bound(kernel, (2, 3, 1), [512, 5]), stream=9)
    assert kernel.given_to_c == [wanted]
    assert not kernel.given


@pytest.mark.parametrize(
    ("version", "metadata"),
    [
        ((3, 5), {}),
        ((3, 10), {}),
        ((3, 6), {"global_scratch_size": 64}),
        ((3, 6), {"profile_scratch_size": 64}),
        ((3, 9), {"instrumentation_mode": "gsan"}),
        ((3, 6), {"target": SimpleNamespace(backend="hip")}),
    ],
    ids=["before", "after", "scratch", "profile", "instrumented", "another device"],
)
def test_other_kernels_are_left_to_tritons_launcher_in_python(monkeypatch, version, metadata):
    monkeypatch.setattr(driver, "_VERSION", version)
    kernel = Launched(**metadata)
    run(*driver.bound(kernel, (2, 3, 1), [512, 5]), stream=9)
    assert kernel.given == [(2, 3, 1, 9, 7, (4, 1, 100), None, None, None, 512, 5)]
    assert not kernel.given_to_c
