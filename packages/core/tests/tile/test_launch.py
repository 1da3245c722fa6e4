"""Launches by one look-up, compiled together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tokenmix_core.tile.driver import bound
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


@pytest.mark.gpu
@pytest.mark.parametrize("flag", [True, False])
def test_a_bound_kernel_takes_arguments_of_every_kind(flag):
    x = torch.randn(16, device="cuda")
    wanted, got = torch.zeros(2, 32, device="cuda")
    args = (x, None, 5, 1 << 40, -3, 1, flag, 0.37)
    for out in (wanted, wanted):
        _write[(2,)](out, *args, ADD=7, ALSO=torch.float32)
    call, taken = _write.driver_call((2,), (got, *args), {"ADD": 7, "ALSO": torch.float32})
    stream = torch.cuda.current_stream().cuda_stream
    call(stream, *(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in taken))
    assert wanted.abs().sum() > 0
    assert torch.equal(got, wanted)


class Launched:
    """A compiled kernel of these types that launches nothing; what its own way of launching was given."""

    def __init__(self, *types, **metadata):
        self.given = []
        self.run, self.function, self.packed_metadata = lambda *args: self.given.append(args), 7, (4, 1, 100)
        self.src = SimpleNamespace(signature=dict(enumerate(types)))
        self.metadata = SimpleNamespace(
            **{
                "target": SimpleNamespace(backend="cuda"), "num_ctas": 1, "num_warps": 4, "shared": 100,
                "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
                "profile_scratch_size": 0, **metadata,
            }
        )  # fmt: skip


@pytest.fixture
def by_torch(monkeypatch):
    """What torch's way of launching was given."""
    given = []
    launcher = SimpleNamespace(_launch_kernel=lambda *args: given.append(args))
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", launcher, raising=False)
    return given


def test_torch_launches_plain_kernels_without_what_is_compiled_in(by_torch):
    kernel = Launched("*bf16", "constexpr", "i32", "fp32", "constexpr")
    call, args = bound(kernel, (2, 3, 1), [512, None, 5, 0.5, True])
    call(9, *args)
    assert by_torch == [(7, 2, 3, 1, 4, 100, "OifOO", (512, 5, 0.5, None, None), 9)]
    assert not kernel.given


@pytest.mark.parametrize(
    "kernel",
    [
        Launched("*bf16", num_ctas=2),
        Launched("*bf16", launch_pdl=True),
        Launched("*bf16", launch_cooperative_grid=True),
        Launched("*bf16", global_scratch_size=64),
        Launched("*bf16", profile_scratch_size=64),
        Launched("*bf16", target=SimpleNamespace(backend="hip")),
        Launched("tensordesc<bf16[64, 64]>"),
        Launched(("*bf16", "i32")),
    ],
    ids=["cluster", "dependent", "cooperative", "scratch", "profile", "other device", "descriptor", "tuple"],
)
def test_triton_launches_other_kernels(by_torch, kernel):
    call, args = bound(kernel, (2, 3, 1), [512])
    call(9, *args)
    assert not by_torch
    assert kernel.given == [(2, 3, 1, 9, 7, (4, 1, 100), None, None, None, 512)]


def test_an_empty_grid_is_left_to_triton(by_torch):
    kernel = Launched("*bf16")
    call, args = bound(kernel, (2, 0, 1), [512])
    call(9, *args)
    assert not by_torch
