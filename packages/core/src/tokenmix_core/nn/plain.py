"""Decide whether a fused path may read a module's parameters instead of calling the module."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix_core.kernels.launch import compat

# other tensor classes (quantised, sharded) define operations of their own, which kernels would bypass
_PLAIN_TENSORS = Tensor, nn.Parameter


def is_plain(kind: type[nn.Module] | tuple[type[nn.Module], ...], *modules: nn.Module | None) -> bool:
    """True if a fused path may read the modules' tensors instead of calling the modules.

    The class of a plain module is exactly `kind`, or one of the tuple `kind`: adapters, quantised layers and
    parametrisations have other classes. A plain module has no hooks, no `forward` set on the object (accelerate's
    offloading sets one) and only plain tensors, none of them on the meta device. None stands for an absent module and
    is plain. While torch has hooks for all modules, no module is plain.

    Every fused path asks this function first; if it returns False, the path calls the modules. It takes about 1 µs per
    module.
    """
    if compat.watches_all_modules():
        return False
    kinds = kind if isinstance(kind, tuple) else (kind,)
    for module in modules:
        if module is None:
            continue
        if type(module) not in kinds or has_hooks(module) or "forward" in module.__dict__:
            return False
        for x in module._parameters.values():
            if x is not None and (type(x) not in _PLAIN_TENSORS or x.is_meta):
                return False
        for x in module._buffers.values():
            if x is not None and (type(x) not in _PLAIN_TENSORS or x.is_meta):
                return False
    return True


def has_hooks(module: nn.Module) -> bool:
    """True if forward or backward hooks are registered on the module itself."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules in the order of `model.modules()`, which takes several times as long in deep models."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += reversed(module._modules.values())
    return [*found]


def third_party_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose classes come neither from torch nor from our packages, such as adapters."""
    return [*filter(is_third_party, modules_of(model))]


def is_third_party(module: nn.Module) -> bool:
    """True if the class of a module comes neither from torch nor from our packages."""
    return not type(module).__module__.startswith(("torch", "tokenmix_"))


def settings_of(modules: Iterable[nn.Module]) -> Hashable:
    """Return the modules' settings: their attributes of plain Python types, and any `forward` set on an object.

    The settings are part of a CUDA graph's key: a graph captured before a switch of adapters must not be replayed
    later.
    """
    return tuple(
        (id(module), *((name, repr(x)) for name, x in vars(module).items() if _is_setting(x)), id(forward))
        for module in modules
        for forward in (module.__dict__.get("forward"),)
    )


def _is_setting(x: Any) -> bool:
    if isinstance(x, dict):
        return all(map(_is_setting, x.values()))
    return all(map(_is_setting, x)) if isinstance(x, list | tuple | set) else isinstance(x, int | float | str | None)


def refuse_meta(x: Tensor, *modules: nn.Module) -> None:
    """Raise a ValueError if x is on a real device but a module is on the meta device and no hook loads its weights.

    Without this check torch's own layers would return uninitialised memory.
    """
    for module in modules:
        meta = any(p is not None and p.is_meta for p in module._parameters.values())
        if meta and not x.is_meta and not has_hooks(module) and "forward" not in module.__dict__:
            raise ValueError(
                f"{type(module).__name__}: the weights are on the meta device and the input is on {x.device}; load the "
                "weights (from_pretrained, to_empty), or let accelerate's hooks load them"
            )


def warn_slower(what: str, modules: Iterable[str]) -> None:
    """Warn once that the layer or function `what` does not take its fused path, because a named module is not plain.

    Under torch.compile there is no warning.
    """
    if not torch.compiler.is_compiling():
        _warn(
            f"{what}: {' or '.join(modules)} has a hook, an adapter or tensors of another class, so that it is called"
        )


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(f"{text}, which is slower than the fused path", RuntimeWarning, stacklevel=3)
