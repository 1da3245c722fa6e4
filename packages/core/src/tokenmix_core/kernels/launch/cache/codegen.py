"""Generate Python code that replays a captured call, and code that compares arguments with a signature."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache.row_calls import is_long, is_slice

# maximum size of the allocation that buffers used only by kernels share: a larger one would hold memory for too long
_MAX_SHARED_BYTES = 4 << 20


class Step(NamedTuple):
    """A step of a captured call: a kernel launch, or an operation of torch.

    A slot is the index of a tensor among the inputs and the allocated tensors of a call.

    Attributes:
        buffers: the tensors allocated before the step: slot, size, stride, dtype.
        call: an operation's `call(*args)`, or a launch's `pack(pointers)`, see `driver.packed`.
        launch: whether the step is a launch.
        args: an operation's arguments.
        operands: the arguments that are tensors: `(argument index, slot, byte offset)` for a launch, `(argument index,
            slot, view)` for an operation.
        result: the slot of an operation's result, None if it allocates nothing.
    """

    buffers: list[tuple]
    call: Callable
    launch: bool
    args: list
    operands: list[tuple]
    result: int | None


def compiled(
    steps: list[Step], tensors: int, outputs: list[tuple | None], make: Callable, launch: Callable
) -> Callable:
    """Return `call(stream, tensors, pointers)`, which executes the steps and returns `make(outputs)`.

    In the generated code, `x0, x1, …` are the tensors by slot, inputs first; `p0, p1, …` are their addresses, and
    `c0, c1, …` constants.
    """
    names: dict[str, Any] = {"empty": compat.empty, "make": make, "launch": launch}

    def constant(x: Any) -> str:
        names[f"c{len(names)}"] = x
        return f"c{len(names) - 1}"

    def viewed(slot: int, view: tuple | None) -> str:
        return f"x{slot}" if view is None else f"x{slot}.as_strided(*{constant(view)})"

    kept = {x[0] for x in outputs if x is not None}
    parts, size = _shared(steps, kept)
    last = {slot: step for step in steps for slot in _slots(step)}
    inputs = ", ".join(f"x{i}" for i in range(tensors)), ", ".join(f"p{i}" for i in range(tensors))
    lines = [f"[{inputs[0]}] = tensors", f"[{inputs[1]}] = pointers"]
    if parts:
        lines += [f"whole = empty({constant((size,))}, (1,), {constant(torch.uint8)})", "start = whole.data_ptr()"]
    # waiting: launches that one call of the driver will make; free: buffers that can be reused after these launches
    waiting: list[Step] = []
    free: list[int] = []

    def launch_waiting() -> None:
        if waiting:
            packed, addresses = _packed(waiting, parts)
            lines.append(f"launch({constant(packed)}, stream, {', '.join(addresses)})")
        lines.extend(f"x{slot} = None" for slot in free)
        waiting.clear()
        free.clear()

    for step in steps:
        made = [x for x in step.buffers if (x[0] in last or x[0] in kept) and x[0] not in parts]
        # make the waiting launches first: new tensors can then reuse the free buffers, and operations see the results
        if (made and free) or not step.launch:
            launch_waiting()
        for slot, *layout in made:
            lines += [f"x{slot} = empty({', '.join(map(constant, layout))})", f"p{slot} = x{slot}.data_ptr()"]
        if step.launch:
            waiting.append(step)
        else:
            args = [*map(constant, step.args)]
            for i, slot, view in step.operands:
                args[i] = viewed(slot, view)
            call = f"{constant(step.call)}({', '.join(args)})"
            lines.append(call if step.result is None else f"x{step.result} = {call}")
            if step.result is not None:
                lines.append(f"p{step.result} = x{step.result}.data_ptr()")
        free += [x for x in last if last[x] is step and x >= tensors and x not in kept and x not in parts]
    launch_waiting()
    results = ", ".join("None" if x is None else viewed(*x) for x in outputs)
    lines.append(f"return make(({results},))")
    exec(_code(_text("call(stream, tensors, pointers)", lines)), names)
    return names["call"]


def _packed(launches: list[Step], parts: dict[int, int]) -> tuple[bytes, list[str]]:
    """Return the packed launches for `driver.launch`, and the addresses, by name, that it gets after the stream."""
    names: dict[str, int] = {}
    packed = []
    for step in launches:
        pointers = {}
        for i, slot, offset in step.operands:
            name = "start" if slot in parts else f"p{slot}"
            pointers[i] = names.setdefault(name, len(names) + 1), offset + parts.get(slot, 0)
        packed.append(step.call(pointers))
    return b"".join(packed), list(names)


def matching(
    call: Callable, inputs: Sequence, device: int, launching: Any, matches: list[int], most: int | None = None,
    *, by_rows: bool = False,
) -> Callable | None:  # fmt: skip
    """Return a function `match(*inputs)` that returns `call` and its arguments for inputs of this signature, else None.

    `matching` returns None if torch lacks guards or an input's address is not a multiple of 16 bytes. `match` also
    returns None for such an address, if `launching` gives no stream for replays, and after `most` matches, which are
    counted in `matches[0]`. If `by_rows`, long inputs (`is_long`) match with any batch size and length if they are
    contiguous, or slices as the given ones.
    """
    if compat.Guards is None or any(x.data_ptr() % 16 for x in inputs if isinstance(x, Tensor)):
        return None
    most = sys.maxsize if most is None else most
    names = {"call": call, "launching": launching, "matches": matches, "device": device, "most": most}
    return _guarded(_match_code, inputs, names, by_rows)


def _match_code(tensors: tuple[int, ...]) -> list[str]:
    """Return the lines of `match` after the comparison with the signature, for the indices of the tensors."""
    given, pointers = (", ".join(f"{letter}{i}" for i in tensors) for letter in "xp")
    unaligned = f"({' | '.join(f'p{i}' for i in tensors)}) & 15"
    return [
        *(f"p{i} = x{i}.data_ptr()" for i in tensors),
        f"stream = None if {unaligned} or matches[0] >= most else launching.replays_on(device)",
        "if stream is None:",
        "    return None",
        "matches[0] += 1",
        f"return call, stream, ({given},), ({pointers},)",
    ]


def alike(inputs: Sequence, matches: list[int]) -> Callable:
    """Return a function that is true if its arguments have the same signature as `inputs`; addresses may differ.

    Matches are counted in `matches[0]`. The function is always false if torch lacks guards.
    """
    if compat.Guards is None:
        return lambda *others: False
    return _guarded(_alike_code, inputs, {"matches": matches})


def _alike_code(tensors: tuple[int, ...]) -> list[str]:
    return ["matches[0] += 1", "return True"]


def _guarded(body: Callable, inputs: Sequence, names: dict[str, Any], by_rows: bool = False) -> Callable:
    """Return a function that runs `body`'s code if its arguments have the signature of `inputs`, else returns None.

    It takes any number of arguments, because an operation may have saved more tensors in one call than in another.
    """
    names["by_rows"], kinds = by_rows, []
    for i, x in enumerate(inputs):
        kinds.append(None if x is None else isinstance(x, Tensor))
        if by_rows and kinds[-1] and is_long(x):
            kinds[-1] = "slice" if is_slice(x) else "rows"
        if kinds[-1] is False:
            names[f"c{i}"], names[f"k{i}"] = x, type(x)
    exec(_guard_code(body, tuple(kinds)), names)
    renew(names["guarded"], inputs)
    return names["guarded"]


@functools.lru_cache(256)
def _guard_code(body: Callable, kinds: tuple[bool | str | None, ...]) -> CodeType:
    """Return the code of a `_guarded` function.

    `kinds` are None for None, True for tensors, "rows" and "slice" for contiguous tensors and slices of any batch size
    and length, False for other inputs.
    """
    different = ["more"]
    for i, kind in enumerate(kinds):
        if kind is None:
            different.append(f"x{i} is not None")
        elif not kind:
            # compare types too, because 1 == True
            different.append(f"x{i}.__class__ is not k{i} or x{i} != c{i}")
    indices = tuple(i for i, kind in enumerate(kinds) if kind)
    tensors = ", ".join(f"x{i}" for i in indices)
    different.append(f"not (same({tensors}) or also({tensors}))")
    different += [f"not x{i}.is_contiguous()" for i, kind in enumerate(kinds) if kind == "rows"]
    different += [
        f"x{i}.shape[0] > 1 and x{i}.stride(0) != x{i}.shape[1] * x{i}.stride(1)"
        for i, kind in enumerate(kinds)
        if kind == "slice"
    ]
    lines = [f"if {' or '.join(different)}:", "    return None", *body(indices)]
    return _code(_text(f"guarded({''.join(f'x{i}=None, ' for i in range(len(kinds)))}*more)", lines))


def renew(guarded: Callable, inputs: Sequence) -> None:
    """Let a function that `_guarded` returned also accept `inputs`, which differ only in torch's dispatch keys.

    Dispatch keys differ with gradients and under autocast. The function accepts the two latest sets of keys.
    """
    names = guarded.__globals__
    names["also"] = names.get("same", lambda *tensors: False)
    names["same"] = _same([x for x in inputs if isinstance(x, Tensor)], names["by_rows"])


def _same(tensors: Sequence[Tensor], by_rows: bool) -> Callable:
    """Return a function that tells whether tensors equal `tensors` in dtype, device, sizes, strides, dispatch keys.

    If `by_rows`, batch size and length of long tensors may differ, and the strides that depend on them.
    """
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    if by_rows:
        sizes = [[None, None, *x[2:]] if len(x) > 2 else x for x in sizes]
        for x, stride in zip(tensors, strides, strict=True):
            if is_long(x):
                stride[: 1 if is_slice(x) else 2] = [None] if is_slice(x) else [None, None]
    return compat.Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _text(head: str, lines: Sequence[str]) -> str:
    return f"def {head}:\n    " + "\n    ".join(lines)


@functools.lru_cache(256)
def _code(text: str) -> CodeType:
    # the compiled code is cached by its text, because calls that differ only in sizes have equal text
    return compile(text, "<replayed call>", "exec")


def _slots(step: Step) -> list[int]:
    """Return the slots (indices) of the tensors that a step reads or allocates."""
    return [slot for _, slot, _ in step.operands] + ([] if step.result is None else [step.result])


def _shared(steps: list[Step], kept: set[int]) -> tuple[dict[int, int], int]:
    """Pack the buffers that only kernels use, without those in slots `kept`, into one allocation.

    Return the offset of each packed slot, and the size of the allocation; {} and 0 if it would be too large or hold
    fewer than two buffers.
    """
    seen = {slot for step in steps if not step.launch for slot in _slots(step)} | kept
    used = {slot for step in steps for slot in _slots(step)}
    parts, size = {}, 0
    for slot, shape, stride, dtype in (x for step in steps for x in step.buffers):
        if slot in used and slot not in seen:
            parts[slot] = size
            elements = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if math.prod(shape) else 0
            size += next_part(elements * dtype.itemsize)
    return (parts, size) if len(parts) > 1 and size <= _MAX_SHARED_BYTES else ({}, 0)


def next_part(end: int) -> int:
    """Return the offset of the next part of a buffer after `end` bytes, aligned as in torch's allocator."""
    return cdiv(end, 512) * 512
