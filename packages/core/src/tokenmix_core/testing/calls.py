"""Types in which the contracts of operations (`OpContract`) describe calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Sizes = Mapping[str, Any]


class Call(NamedTuple):
    """The arguments of a call, by name.

    Attributes:
        tensors: the arguments that have gradients; for an operation without gradients, the tensors whose layout and
            dtype tests vary.
        options: the other arguments.
    """

    tensors: dict[str, Tensor]
    options: dict[str, Any]


class KernelCase(NamedTuple):
    """Sizes of a call that kernels compute in a special way, for example with other tiles than usual.

    Attributes:
        sizes: keyword arguments of the contract's `make`.
        form: name of the function in the contract's `forms` that is called; by default the first one.
        patch: a function that takes `tuning.override` and selects the special way by it; None if the sizes suffice.
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
