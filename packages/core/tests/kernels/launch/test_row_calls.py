"""Test that one capture of a row operation serves all batch sizes and lengths, on a CPU that is treated as a GPU."""

import struct
from types import SimpleNamespace

import pytest
import torch

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch import compat, launcher
from tokenmix_core.kernels.launch.cache import driver, replay
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.kernels.launch.cache.row_calls import RowCall
from tokenmix_core.ops.buffers import rows_of

from .conftest import at

BM, D = 4, 6


class Kernel:
    """A kernel y = factor · x + other on rows; its programs are counted."""

    arg_names, __name__ = ("x", "factor", "other", "y", "rows", "size", "stride", "BM"), "scale"

    def __init__(self, declared=("rows",)):
        self.params = [SimpleNamespace(is_constexpr=x == "BM", do_not_specialize=x in declared) for x in self.arg_names]

    def warmup(self, *args, **options):
        pass


class Scaled:
    """The operation; counts its runs, and keeps the number of programs of its last launch."""

    def __init__(self, kernel, spare=0):
        self.kernel, self.spare, self.runs, self.programs = launcher._Launcher(kernel), spare, 0, 0

    def __call__(self, x, factor, other=None):
        self.runs += 1
        y, given = torch.empty(x.shape), x.contiguous()
        (found, rows, _, stride) = rows_of(given if other is None else other)
        self.kernel[(cdiv(rows, BM) + self.spare,)](
            x=given, factor=factor, other=found, y=y, rows=rows, size=D, stride=stride, BM=BM
        )
        return y

    def launch(self, words, stream, *addresses):
        """Do the work of the C launcher and of the kernel."""
        header = struct.unpack(f"{len(words) // 8}Q", words)
        self.programs = header[2]
        values, pointers = [*header[10:17]], header[10 + header[8] :]
        for index, address, offset in zip(pointers[::3], pointers[1::3], pointers[2::3], strict=True):
            values[index] = (stream, *addresses)[address] + offset
        x, factor, other, y, rows, size, stride = values
        y = at(y, rows * size)
        y[:] = at(x, rows * size) * at(factor, 1)
        if other != x:
            for row in range(rows):
                y[row * size : (row + 1) * size] += at(other + 4 * row * stride, size)


@pytest.fixture
def scaled(monkeypatch):
    """Return a function that makes the operation, and its calls through the launch cache."""
    formats = ("Q", "Q", "Q", "Q", "i", "i", "i", None)
    monkeypatch.setattr(launcher, "_load", lambda *_: driver.Loaded(7, 128, 0, False, formats))
    monkeypatch.setattr(launcher, "_prepared", list)
    monkeypatch.setattr(launcher, "current_device", lambda: -1)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 0)
    monkeypatch.setattr(driver, "_cuda_launch", lambda: 1)
    monkeypatch.setattr(compat, "empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(compat, "unspecialised", lambda kernel, names: None)
    monkeypatch.setattr(replay, "on_gpu", lambda x: True)

    def make(**options):
        run = Scaled(Kernel(**{k: v for k, v in options.items() if k == "declared"}), options.get("spare", 0))
        monkeypatch.setattr(launcher, "launch", lambda: run.launch)
        return run, Replayed(run, RowCall())

    return make


def check(replayed, *shape):
    x, factor = torch.randn(*shape, D), torch.randn(1)
    y = replayed(x, factor)
    torch.testing.assert_close(y, x * factor, rtol=0, atol=0)
    assert y.stride() == x.stride()


@pytest.mark.parametrize("inner", [(), (3,)], ids=["rows", "heads"])
def test_one_capture_serves_all_batch_sizes_and_lengths(scaled, inner):
    run, replayed = scaled()
    for B, T in ((2, 5), (2, 5), (1, 1), (7, 300), (3, 64), (1, 31)):
        check(replayed, B, T, *inner)
        assert run.programs == cdiv(B * T * (3 if inner else 1), BM)
    assert run.runs == 1


def test_calls_under_inference_mode_share_one_capture_of_their_own(scaled):
    run, replayed = scaled()
    for T in (5, 6):
        check(replayed, 2, T)
        with torch.inference_mode():
            for length in (T, 40 + T):
                check(replayed, 2, length)
    assert run.runs <= 3


def test_slices_of_later_inputs_share_one_capture(scaled):
    run, replayed = scaled()
    for B, T in ((2, 5), (1, 1), (7, 300), (3, 64), (1, 31), (4, 2)):
        x, other, factor = torch.randn(B, T, D), torch.randn(B, T, 16)[..., 4 : 4 + D], torch.randn(1)
        torch.testing.assert_close(replayed(x, factor, other), x * factor + other, rtol=0, atol=0)
    assert run.runs == 1
    # a slice of another tensor has another distance between tokens, and a slice along time has two
    for other in (torch.randn(2, 5, 20)[..., 4 : 4 + D], torch.randn(2, 9, 16)[:, :5, 4 : 4 + D]):
        x, factor = torch.randn(2, 5, D), torch.randn(1)
        torch.testing.assert_close(replayed(x, factor, other), x * factor + other, rtol=0, atol=0)
    assert run.runs == 3


def test_slices_are_run_or_captured_by_themselves(scaled):
    run, replayed = scaled()
    for T in (5, 6, 7):
        check(replayed, 2, T)
        x, factor = torch.randn(T, 2, D).transpose(0, 1), torch.randn(1)
        torch.testing.assert_close(replayed(x, factor), x * factor, rtol=0, atol=0)
    assert run.runs == 1 + 3


def test_other_sizes_of_heads_need_a_capture(scaled):
    run, replayed = scaled()
    for heads in (1, 2, 3):
        for T in (5, 6):
            check(replayed, 2, T, heads)
    assert run.runs >= 3


@pytest.mark.parametrize("options", [{"declared": ()}, {"spare": 1}], ids=["specialised rows", "other grids"])
def test_launches_that_depend_on_lengths_in_another_way_are_captured_for_each_length(scaled, options):
    run, replayed = scaled(**options)
    for T in (5, 6, 7):
        check(replayed, 2, T)
        assert run.programs == cdiv(2 * T, BM) + options.get("spare", 0)
    assert run.runs == 3
