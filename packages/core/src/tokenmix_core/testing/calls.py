"""Descriptions of calls of operations, which contracts use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Sizes = Mapping[str, Any]


class Call(NamedTuple):
    """Arguments of a call by name.

    Attributes:
        tensors: the arguments that have gradients.
        options: the other arguments.
    """

    tensors: dict[str, Tensor]
    options: dict[str, Any]


class KernelCase(NamedTuple):
    """Sizes of a call that kernels compute in a special way, for example with other tiles.

    Attributes:
        sizes: keyword arguments for `make`.
        form: the form of the operation to call; by default the contract's first one.
        patch: a function that takes `tuning.override` and uses it to select the special way; None if the sizes suffice.
        dtypes: names of the dtypes to test; by default those of the contract.
    """

    sizes: Sizes
    form: str | None = None
    patch: Callable[[Callable[..., None]], Any] | None = None
    dtypes: tuple[str, ...] | None = None


class Results(dict):
    """Tensors by name, with the method `_asdict` that `values_and_gradients` calls."""

    def _asdict(self) -> dict[str, Tensor]:
        return dict(self)
