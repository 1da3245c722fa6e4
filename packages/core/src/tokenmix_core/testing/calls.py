"""Calls of operations, as contracts describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Sizes = Mapping[str, Any]


class Call(NamedTuple):
    """Arguments of a call by name.

    Attributes:
        tensors: those that have gradients.
        options: the others.
    """

    tensors: dict[str, Tensor]
    options: dict[str, Any]


class KernelCase(NamedTuple):
    """Sizes of a call that takes a way of its own through the kernels.

    Attributes:
        sizes: as `make` takes them.
        form: of which form of execution the kernels are; the first one's by default.
        patch: `patch(override)`, selects this way, such as tiles of other sizes, by `tuning.override`.
        dtypes: by name, those that the case is run in; the contract's by default.
    """

    sizes: Sizes
    form: str | None = None
    patch: Callable[[Callable[..., None]], Any] | None = None
    dtypes: tuple[str, ...] | None = None


class Results(dict):
    """Tensors by name, as `values_and_gradients` expects them."""

    def _asdict(self) -> dict[str, Tensor]:
        return dict(self)
