"""Read and set the windows of a model's NHA layers, permanently or in a context; also for converted models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from tokenmix_nha.mixer import NhaMixer
from tokenmix_nha.windows import Window, check_windows


def nha_mixers(model: nn.Module) -> list[NhaMixer]:
    """Return the model's Native Hybrid Attention mixers, in the order of its layers.

    Raises:
        ValueError: the model has no such mixer.
    """
    mixers = [module for module in model.modules() if isinstance(module, NhaMixer)]
    if not mixers:
        raise ValueError(f"{type(model).__name__} has no layer of Native Hybrid Attention whose window could be set")
    return mixers


def nha_layer_indices(model: nn.Module) -> list[int]:
    """Return the layer indices of the model's Native Hybrid Attention mixers, from 0."""
    mixers = {id(mixer) for mixer in nha_mixers(model)}
    names = [name for name, module in model.named_modules() if id(module) in mixers]
    return [next(int(part) for part in name.split(".") if part.isdigit()) for name in names]


def windows_of(model: nn.Module) -> list[Window]:
    """Return the window that each NHA layer has at present."""
    return [mixer.window for mixer in nha_mixers(model)]


def set_windows(model: nn.Module, windows: Window | Sequence[Window]) -> None:
    """Set the windows of the layers for all later calls; configuration and weights do not change.

    A cache that was filled with other windows must not be used afterwards.

    Raises:
        ValueError: an invalid window, or more or fewer windows than NHA layers.
    """
    mixers = nha_mixers(model)
    for mixer, window in zip(mixers, check_windows(windows, len(mixers), mixers[0].slots), strict=True):
        mixer.window = window


@contextmanager
def using_windows(model: nn.Module, windows: Window | Sequence[Window]) -> Iterator[None]:
    """Context manager: the layers have the given windows inside, and their previous windows after it."""
    before = windows_of(model)
    set_windows(model, windows)
    try:
        yield
    finally:
        set_windows(model, before)
