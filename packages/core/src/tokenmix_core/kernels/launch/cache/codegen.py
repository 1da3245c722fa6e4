"""A recorded call as Python: what a replay does, written out step by step, without loops over what never changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch import compat

# buffers that nobody sees are parts of one where they are smaller together: more would be held longer than needed
_TOGETHER = 4 << 20


class Step(NamedTuple):
    """A launch, or an operation of torch.

    Attributes:
        buffers: what is made before it: slot, size, stride, dtype.
        call: an operation's `call(*args)`, or what packs a launch for `driver.launch`, `pack(places)`.
        launch: which of the two it is.
        args: an operation's arguments.
        places: which arguments are addresses, `(place, slot, bytes from there)`, or tensors, `(place, slot, view)`.
        result: the slot of what an operation makes, None where it makes nothing.
    """

    buffers: list[tuple]
    call: Callable
    launch: bool
    args: list
    places: list[tuple]
    result: int | None


def compiled(
    steps: list[Step], tensors: int, outputs: list[tuple | None], make: Callable, launch: Callable
) -> Callable:
    """`call(stream, tensors, pointers)`: the steps on inputs, whose slots come first, and what `make` makes of outputs.

    Tensors are `x0, x1, …` by slot and their addresses `p0, p1, …`; what else is needed are constants `c0, c1, …`.
    """
    names: dict[str, Any] = {"empty": compat.empty, "make": make, "launch": launch}

    def constant(x: Any) -> str:
        names[f"c{len(names)}"] = x
        return f"c{len(names) - 1}"

    def viewed(slot: int, view: tuple | None) -> str:
        return f"x{slot}" if view is None else f"x{slot}.as_strided(*{constant(view)})"

    kept = {x[0] for x in outputs if x is not None}
    parts, room = _together(steps, kept)
    last = {slot: step for step in steps for slot in _slots(step)}
    inputs = ", ".join(f"x{i}" for i in range(tensors)), ", ".join(f"p{i}" for i in range(tensors))
    lines = [f"[{inputs[0]}] = tensors", f"[{inputs[1]}] = pointers"]
    if parts:
        lines += [f"whole = empty({constant((room,))}, (1,), {constant(torch.uint8)})", "start = whole.data_ptr()"]
    # launches that wait for others, to be made by one call, and buffers that are free after them
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
        # what is free is used again
        if (made and free) or not step.launch:
            launch_waiting()
        for slot, *layout in made:
            lines += [f"x{slot} = empty({', '.join(map(constant, layout))})", f"p{slot} = x{slot}.data_ptr()"]
        if step.launch:
            waiting.append(step)
        else:
            args = [*map(constant, step.args)]
            for place, slot, view in step.places:
                args[place] = viewed(slot, view)
            call = f"{constant(step.call)}({', '.join(args)})"
            lines.append(call if step.result is None else f"x{step.result} = {call}")
            if step.result is not None:
                lines.append(f"p{step.result} = x{step.result}.data_ptr()")
        free += [x for x in last if last[x] is step and x >= tensors and x not in kept and x not in parts]
    launch_waiting()
    results = ", ".join("None" if x is None else viewed(*x) for x in outputs)
    lines.append(f"return make(({results},))")
    return _function("call(stream, tensors, pointers)", lines, names)


def _packed(launches: list[Step], parts: dict[int, int]) -> tuple[bytes, list[str]]:
    """Launches for `driver.launch`, and the names of the addresses that follow the stream."""
    names: dict[str, int] = {}
    packed = []
    for step in launches:
        places = {}
        for place, slot, offset in step.places:
            name = "start" if slot in parts else f"p{slot}"
            places[place] = names.setdefault(name, len(names) + 1), offset + parts.get(slot, 0)
        packed.append(step.call(places))
    return b"".join(packed), list(names)


def matching(
    call: Callable, inputs: Sequence, device: int, launching: Any, matches: list[int], most: int | None = None
) -> Callable | None:
    """`match(*inputs)`: `call` with its arguments, for inputs that look like these; None for others, which may too.

    None where that cannot be found out faster than by their kind. Matches are counted in `matches[0]`, and
    end with `most` of them.
    """
    tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    if compat.Guards is None or any(x.data_ptr() % 16 for x in tensors.values()):
        return None
    given, places = (", ".join(f"{letter}{i}" for i in tensors) for letter in "xp")
    ended = "" if most is None else f" or matches[0] >= {most}"
    lines = [
        *(f"p{i} = x{i}.data_ptr()" for i in tensors),
        f"stream = None if ({' | '.join(f'p{i}' for i in tensors)}) & 15{ended} else launching.replays_on({device})",
        "if stream is None:",
        "    return None",
        "matches[0] += 1",
        f"return call, stream, ({given},), ({places},)",
    ]
    return _guarded("match", inputs, lines, {"call": call, "launching": launching, "matches": matches})


def alike(inputs: Sequence, matches: list[int]) -> Callable:
    """`looks(*inputs)`: whether as many others look like these, addresses apart; else None or False.

    Matches are counted in `matches[0]`.
    """
    if compat.Guards is None:
        return lambda *others: False
    return _guarded("looks", inputs, ["matches[0] += 1", "return True"], {"matches": matches})


def _guarded(name: str, inputs: Sequence, lines: list[str], names: dict[str, Any]) -> Callable:
    """A function of inputs that look like these, and None of others."""
    different = []
    for i, x in enumerate(inputs):
        if x is None:
            different.append(f"x{i} is not None")
        elif not isinstance(x, Tensor):
            # 1 and True are equal
            names |= {f"c{i}": x, f"k{i}": type(x)}
            different.append(f"x{i}.__class__ is not k{i} or x{i} != c{i}")
    tensors = ", ".join(f"x{i}" for i, x in enumerate(inputs) if isinstance(x, Tensor))
    different.append(f"not (same({tensors}) or also({tensors}))")
    lines = [f"if {' or '.join(different)}:", "    return None", *lines]
    function = _function(f"{name}({', '.join(f'x{i}' for i in range(len(inputs)))})", lines, names)
    renew(function, inputs)
    return function


def renew(guarded: Callable, inputs: Sequence) -> None:
    """Expect tensors like these too, which differ otherwise from the last: with gradients, or under autocast."""
    names = guarded.__globals__
    names["also"] = names.get("same", lambda *tensors: False)
    names["same"] = _same([x for x in inputs if isinstance(x, Tensor)])


def _same(tensors: Sequence[Tensor]) -> Callable:
    """`same(*tensors)`: whether others have the type, dtype, device, sizes, strides and dispatch of these."""
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return compat.Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _function(head: str, lines: Sequence[str], names: dict[str, Any]) -> Callable:
    exec(_code(f"def {head}:\n    " + "\n    ".join(lines)), names)
    return names[head.split("(")[0]]


@functools.lru_cache(256)
def _code(text: str) -> CodeType:
    # calls that differ in sizes alone have the same text
    return compile(text, "<replayed call>", "exec")


def _slots(step: Step) -> list[int]:
    """The tensors that a step uses or makes."""
    return [slot for _, slot, _ in step.places] + ([] if step.result is None else [step.result])


def _together(steps: list[Step], kept: set[int]) -> tuple[dict[int, int], int]:
    """Where in one buffer those begin that only launches see, and its size; nothing where that is too much."""
    seen = {slot for step in steps if not step.launch for slot in _slots(step)} | kept
    used = {slot for step in steps for slot in _slots(step)}
    parts, room = {}, 0
    for slot, size, stride, dtype in (x for step in steps for x in step.buffers):
        if slot in used and slot not in seen:
            parts[slot] = room
            numbers = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else 0
            room += next_part(numbers * dtype.itemsize)
    return (parts, room) if len(parts) > 1 and room <= _TOGETHER else ({}, 0)


def next_part(end: int) -> int:
    """Where a part of one buffer begins after `end` bytes: where the allocator would begin a tensor of its own."""
    return cdiv(end, 512) * 512
