"""A kernel that adds values at addresses instead of a Triton kernel, to test captures and replays on a CPU."""

import ctypes
import struct

import numpy as np
import pytest
import torch

pytest.importorskip("triton")


def at(address, n):
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (n,))


class Adding:
    """`out = a + b` of n float32 elements, launched as `cached_launch` does; counts its launches."""

    def __init__(self, kernels):
        self.kernels, self.launches = kernels, 0

    def __getitem__(self, grid):
        def call(*args, **options):
            take = self.kernels._taker.take
            if take is not None:
                take((self, grid, args, options))
            else:
                addresses = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args)
                self._run(*addresses)

        return call

    def packing(self, grid, args, options):
        return lambda pointers: struct.pack("7q", *(x for i in range(3) for x in pointers[i]), args[3])

    def launch(self, packed, stream, *addresses):
        """Do the work of the C launcher."""
        addresses = stream, *addresses
        for *pointers, n in struct.iter_unpack("7q", packed):
            self._run(*(addresses[i] + offset for i, offset in zip(pointers[::2], pointers[1::2], strict=True)), n)

    def _run(self, a, b, out, n):
        self.launches += 1
        at(out, n)[:] = at(a, n) + at(b, n)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Make the modules of `launch` treat a CPU as a GPU, and give them the kernel."""

    def put(kernels, private, replay):
        adding = Adding(kernels)
        monkeypatch.setattr(replay, "on_gpu", lambda x: True)
        monkeypatch.setattr(private, "empty", torch._C._dynamo.guards._empty_strided_cpu)
        monkeypatch.setattr(kernels, "current_device", lambda: -1)
        monkeypatch.setattr(kernels, "current_stream", lambda device: 0)
        monkeypatch.setattr(kernels, "launch", lambda: adding.launch)
        return adding

    return put


@pytest.fixture
def add(fake_gpu):
    from tokenmix_core.kernels.launch import compat, launcher
    from tokenmix_core.kernels.launch.cache import replay

    return fake_gpu(launcher, compat, replay)
