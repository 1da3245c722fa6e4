"""Checks of arguments: each raises a ValueError that states the argument, the expected value and the given one."""

from __future__ import annotations

import functools
import math
from typing import NoReturn

import torch
from torch import Tensor


def bind_shapes(op: str, dims: dict[str, int], **specs: tuple[Tensor | None, str]) -> dict[str, int]:
    """Check tensors against shapes such as `"B T H K"`: a letter stands for the size at its first occurrence.

    All tensors must lie on the device of the first one. A shape that ends in `?` allows None for the tensor.

    Args:
        op: the operation's name, which begins error messages.
        dims: sizes of the letters known so far; this dictionary is extended and returned.
        specs: for each argument name the tensor and its shape: letters or integers separated by blanks.

    Raises:
        ValueError: a tensor does not match; the message has the given and the expected value.
    """
    first, device = "", None
    # torch.compile warns about each `functools.cache` that it traces
    letters_of = _split if torch.compiler.is_compiling() else _letters
    for name, (x, spec) in specs.items():
        if x is None and spec.endswith("?"):
            continue
        spec = spec.removesuffix("?")
        if not isinstance(x, Tensor):
            got = "None" if x is None else type(x).__name__
            raise ValueError(f"{op}: {name} must be a tensor of shape [{spec.replace(' ', ', ')}], got {got}")
        letters, shape = letters_of(spec), x.shape
        ok = len(shape) == len(letters)
        if ok:
            for letter, size in zip(letters, shape, strict=True):
                if (letter if letter.__class__ is int else dims.setdefault(letter, size)) != size:
                    ok = False
        if not ok:
            letters = spec.split()
            bound = ", ".join(f"{k}={v}" for k, v in dims.items() if k in letters)
            wanted = f"[{', '.join(letters)}]" + (f" with {bound}" if bound else "")
            raise ValueError(f"{op}: {name} must have shape {wanted}, got {list(shape)}")
        if device is None:
            first, device = name, x.device
        elif x.device != device:
            _refuse_devices(op, (first, device), (name, x.device))
    return dims


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """Raise a ValueError unless all tensors lie on one device."""
    (first, device), *others = [(name, x.device) for name, x in tensors.items() if x is not None]
    for name, other in others:
        if other != device:
            _refuse_devices(op, (first, device), (name, other))


def _refuse_devices(op: str, first: tuple[str, torch.device], other: tuple[str, torch.device]) -> NoReturn:
    # if one of the two is on the meta device (it has no values), the message blames that one
    (_, wanted), (name, found) = sorted((first, other), key=lambda x: x[1].type == "meta")
    raise ValueError(f"{op}: {name} is on {found}, expected {wanted} like the other tensors")


def _split(spec: str) -> tuple[str | int, ...]:
    return tuple(int(letter) if letter.isdigit() else letter for letter in spec.split())


_letters = functools.cache(_split)


def check_scale(op: str, scale: object) -> float:
    """Return the scale as a float; raise a ValueError if it is not finite."""
    try:
        number = float(scale)  # type: ignore[arg-type]
        if torch.compiler.is_compiling():
            # a traced scale may be a symbol without a value, which cannot be checked
            return number
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{op}: scale must be a finite number, got {scale!r}")
    return number


def check_tensors(op: str, **tensors: object) -> None:
    """Raise a ValueError unless all arguments are tensors."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {'None' if x is None else type(x).__name__}")


def check_dtype(op: str, allowed: tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    """Raise a ValueError for a tensor whose dtype is not one of `allowed`."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            raise ValueError(f"{op}: {name} must be {names}, got {str(x.dtype).removeprefix('torch.')}")


def check_same_dtype(op: str, **tensors: Tensor | None) -> None:
    """Raise a ValueError unless all tensors share one dtype."""
    present = {name: x.dtype for name, x in tensors.items() if x is not None}
    if len(set(present.values())) > 1:
        got = ", ".join(f"{name} {str(d).removeprefix('torch.')}" for name, d in present.items())
        raise ValueError(f"{op}: {', '.join(present)} must share one dtype, got {got}")


def check_multiple(op: str, name: str, size: int, of: str, divisor: int) -> None:
    """Raise a ValueError unless `size` is a multiple of `divisor`; `name` and `of` are their names in the message."""
    if divisor <= 0 or size % divisor:
        raise ValueError(f"{op}: {name} must be a multiple of {of}, got {name}={size} and {of}={divisor}")


def check_cu_seqlens(op: str, cu_seqlens: Tensor | None, batch: int, tokens: int) -> int | None:
    """Check the boundaries of a packed batch; return the number of sequences, None for an unpacked batch.

    Tokens after the last boundary are padding (`padding.py`). The boundaries' values are checked only if they are on a
    CPU: reading them from a GPU would wait for its stream.

    Raises:
        ValueError: `cu_seqlens` has a wrong type, shape, dtype, stride or value, or `batch` is not 1.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{op}: cu_seqlens must be a tensor of shape [N + 1], got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"{op}: cu_seqlens must have shape [N + 1] with N ≥ 1, got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: cu_seqlens must be int32 or int64, got {str(cu_seqlens.dtype).removeprefix('torch.')}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"{op}: cu_seqlens must be contiguous, got stride {cu_seqlens.stride(0)}")
    if batch != 1:
        raise ValueError(f"{op}: a packed batch has B = 1, got B = {batch} together with cu_seqlens")
    if not cu_seqlens.is_cuda and not torch.compiler.is_compiling():
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last > tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(
                f"{op}: cu_seqlens must rise from 0 to at most T = {tokens} without falling, "
                f"got {cu_seqlens.tolist()[:16]}"
            )
    return cu_seqlens.numel() - 1


def check_packed_queries(op: str, dims: dict[str, int], q: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check the boundaries of a packed batch of attention, which has as many queries (TQ) as keys (TK)."""
    check_cu_seqlens(op, cu_seqlens, dims["B"], dims["TQ"])
    if cu_seqlens is not None:
        bind_shapes(op, {}, q=(q, "B TQ HQ K"), cu_seqlens=(cu_seqlens, "N_plus_1"))
        if dims["TQ"] != dims["TK"]:
            raise ValueError(f"{op}: cu_seqlens needs as many queries as keys, got TQ={dims['TQ']} and TK={dims['TK']}")
