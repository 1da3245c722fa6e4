"""Replay calls of row operations with any number of rows, so that a new length needs no capture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache.driver import packed

if TYPE_CHECKING:
    from tokenmix_core.kernels.launch.cache.codegen import Step

# maximum number of sizes for which a call's packed launch is stored
_MAX_LENGTHS = 8


class RowCall(NamedTuple):
    """How the launch of a row operation depends on the first two dimensions of its arguments, batch and length.

    The operation launches one kernel. The grid's first axis has a program for each block of rows. All else depends on
    the arguments' other dimensions, strides, dtypes and options. The kernel declares the parameters named here in
    `do_not_specialize`.

    Attributes:
        rows: the parameter that is the number of rows, proportional to the first argument's number of elements.
        block: the constexpr that is the number of rows of a block.
        others: further parameters, each with the index of the argument to whose number of elements it is proportional.
    """

    rows: str = "rows"
    block: str = "BM"
    others: Mapping[str, int] = {}


def is_long(x: Tensor) -> bool:
    """True for a tensor `[B, T, ...]`, whose first two dimensions are batch and length; weights have one or two."""
    return x.dim() > 2


def row_call(
    by: RowCall,
    step: Step,
    kernel: Any,
    inputs: Sequence,
    outputs: list[tuple | None],
    make: Callable,
    launch: Callable,
) -> Callable | None:
    """Return `call(stream, tensors, pointers)`, which makes a captured launch for inputs of any batch size and length.

    Return None if the capture is not as `RowCall` says, if a long input is not contiguous, or if a result is a view.

    Args:
        by: what depends on batch and length.
        step, kernel: the captured launch, and its kernel.
        inputs: the arguments of the captured call.
        outputs: slots and views of the results, as in `codegen.compiled`.
        make: makes the result of a list of tensors.
        launch: the launcher in C.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    first, launched = inputs[0], getattr(step.call, "args", None)
    if launched is None or not is_long(first) or any(offset for *_, offset in step.operands):
        return None
    if not all(x.is_contiguous() for x in tensors if is_long(x)):
        return None
    loaded, grid, values = launched
    names, declared = compat.argument_names(kernel.fn), compat.declared_unspecialised(kernel.fn)
    scaled = []
    for name, index in {by.rows: 0, **by.others}.items():
        place, x = names.index(name), inputs[index]
        if not declared[place] or not values[place] or x.numel() % values[place]:
            return None
        slot = next(i for i, y in enumerate(tensors) if y is x)
        scaled.append((place, slot, x.numel() // values[place]))
    rows, block, inner = scaled[0][0], values[names.index(by.block)], first.stride()[1:]
    whole = tuple(first.shape), first.stride()
    same = all(x[1:3] == whole for x in step.buffers) and all(x is None or x[1] is None for x in outputs)
    if not same or grid[0] != cdiv(values[rows], block):
        return None
    empty, dtypes = compat.empty, [dtype for *_, dtype in step.buffers]
    pointers_of = {place: (slot + 1, 0) for place, slot, _ in step.operands}
    results, slots = [None if x is None else x[0] for x in outputs], [slot for _, slot, _ in scaled]

    @functools.lru_cache(_MAX_LENGTHS)
    def words_of(*elements: int) -> bytes:
        given = list(values)
        for (place, _, size), number in zip(scaled, elements, strict=True):
            given[place] = number // size
        return packed(loaded, (cdiv(given[rows], block), *grid[1:]), given, pointers_of)

    def call(stream: int, tensors: tuple, pointers: tuple) -> Any:
        shape = tuple(tensors[0].shape)
        stride = (shape[1] * inner[0], *inner)
        made = [empty(shape, stride, dtype) for dtype in dtypes]
        words = words_of(*[tensors[slot].numel() for slot in slots])
        launch(words, stream, *pointers, *[x.data_ptr() for x in made])
        tensors = (*tensors, *made)
        return make([None if x is None else tensors[x] for x in results])

    return call
