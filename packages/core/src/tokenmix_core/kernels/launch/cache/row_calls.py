"""Replay calls of row operations with any number of rows, so that a new length needs no capture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache.driver import packed

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


def is_slice(x: Tensor) -> bool:
    """True for a long tensor that is not contiguous, but whose tokens have one distance, as in slices `[..., i:j]`."""
    return not x.is_contiguous() and x.shape[1] > 1 and x.stride(0) == x.shape[1] * x.stride(1)


def row_call(
    by: RowCall,
    kernel: Any,
    pack: Callable,
    buffers: Sequence[tuple],
    operands: Sequence[tuple],
    inputs: Sequence,
    outputs: list[tuple | None],
    make: Callable,
    launch: Callable,
) -> Callable | None:
    """Return `call(stream, tensors, pointers)`, which makes a captured launch for inputs of any batch size and length.

    Return None if the capture is not as `RowCall` says, if a result is a view, if the first input is not contiguous, or
    if another long input is neither contiguous nor a slice.

    Args:
        by: what depends on batch and length.
        kernel: the kernel of the captured launch.
        pack, buffers, operands: the captured launch, as `codegen.Step` describes it; `pack` is its `call`.
        inputs: the arguments of the captured call.
        outputs: slots and views of the results, as in `codegen.compiled`.
        make: makes the result of a list of tensors.
        launch: the launcher in C.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    first, launched = inputs[0], getattr(pack, "args", None)
    if launched is None or not (is_long(first) and first.is_contiguous()) or any(x[2] for x in operands):
        return None
    if not all(x.is_contiguous() or is_slice(x) for x in tensors if is_long(x)):
        return None
    loaded, grid, values = launched
    names, declared = compat.argument_names(kernel.fn), compat.declared_unspecialised(kernel.fn)
    scaled = []
    for name, given in {by.rows: 0, **by.others}.items():
        i, x = names.index(name), inputs[given]
        if not declared[i] or not values[i] or x.numel() % values[i]:
            return None
        slot = next(j for j, y in enumerate(tensors) if y is x)
        scaled.append((i, slot, x.numel() // values[i]))
    rows, block, inner = scaled[0][0], values[names.index(by.block)], first.stride()[1:]
    whole = tuple(first.shape), first.stride()
    same = all(x[1:3] == whole for x in buffers) and all(x is None or x[1] is None for x in outputs)
    if not same or grid[0] != cdiv(values[rows], block):
        return None
    empty, dtypes = compat.empty, [dtype for *_, dtype in buffers]
    pointers_of = {i: (slot + 1, 0) for i, slot, _ in operands}
    results, slots = [None if x is None else x[0] for x in outputs], [slot for _, slot, _ in scaled]

    @functools.lru_cache(_MAX_LENGTHS)
    def words_of(*elements: int) -> bytes:
        given = list(values)
        for (i, _, size), number in zip(scaled, elements, strict=True):
            given[i] = number // size
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
