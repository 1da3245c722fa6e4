"""An emulator that runs Gluon kernels on a CPU: torch executes their Python code, one program after another.

Triton's interpreter does not support Gluon. This emulator supports those features of Gluon that our kernels use.
Layouts have no effect, async copies and MMAs complete immediately, and warp partitions are threads that wait at
barriers. It shows whether a kernel computes the right result, not whether its waits suffice. Its scope is frozen.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from math import prod
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from tokenmix_core.testing.gluon_pointers import Pointer, SelectedPointer

_GLUON = "triton.experimental.gluon"
# name of Triton's module for programmatic dependent launch
_CUDA = "triton.language.extra.cuda"
# stands for the dtype uint32, whose values torch cannot compare
_UINT32 = "uint32"


class Shared:
    """A tile of shared memory, initially NaN (−1 for integers)."""

    layout = None

    def __init__(self, data: Tensor):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    def permute(self, order):
        return Shared(self.data.permute(*order))

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, int(start), length))

    def index(self, i):
        return Shared(self.data[int(i)])

    def reinterpret(self, dtype, shape, layout):
        return Shared(self.data.flatten().view(dtype)[: prod(shape)].view(shape))

    def load(self, layout) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        assert x.dtype == self.dtype
        assert x.shape == self.data.shape
        self.data.copy_(x)


class Barrier:
    """An mbarrier, whose phase ends after `count` arrivals."""

    changed = threading.Condition()
    broken = False

    def init(self, count: int) -> None:
        self.count, self.missing, self.parity = count, count, 0

    def arrive(self, count: int = 1) -> None:
        with Barrier.changed:
            self.missing -= count
            assert self.missing >= 0, "more arrived than were announced"
            if self.missing == 0:
                self.missing, self.parity = self.count, 1 - self.parity
            Barrier.changed.notify_all()

    def wait(self, parity) -> None:
        """Wait until the phase with this parity has ended; a barrier starts as if a phase with parity 1 had ended."""
        with Barrier.changed:
            over = Barrier.changed.wait_for(lambda: Barrier.broken or self.parity != int(parity), timeout=60)
            assert over, "a barrier was waited for in vain"
            assert not Barrier.broken, "another partition failed"


class Barriers:
    """An array of barriers in shared memory."""

    def __init__(self, count: int):
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i) -> Barrier:
        return self.barriers[int(i)]


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout) -> Shared | Barriers:
    """Allocate a tile of shared memory; for int64 allocate barriers, the only use of this dtype in our kernels."""
    if dtype == torch.int64:
        return Barriers(shape[0])
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))


def _warp_specialize(partitions: Sequence[tuple[Callable, tuple]], warps, registers) -> None:
    @torch.no_grad()
    def run(function: Callable, arguments: tuple) -> None:
        try:
            # each partition gets a copy of the arguments: torch tensors are mutable, unlike values in Gluon
            function(*(x.clone() if isinstance(x, Tensor) else x for x in arguments))
        except BaseException:
            with Barrier.changed:
                Barrier.broken = True
                Barrier.changed.notify_all()
            raise

    Barrier.broken = False
    with ThreadPoolExecutor(len(partitions)) as threads:
        done, _ = wait([threads.submit(run, *partition) for partition in partitions], return_when=FIRST_EXCEPTION)
    for partition in done:
        partition.result()


class Jit:
    """A kernel, or a device function that kernels call."""

    def __init__(self, function: Callable, language: ModuleType):
        self.function, self.language = function, language

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: Sequence[int]):
        def launch(*args, **options: int) -> None:
            signature = inspect.signature(self.function)
            # keywords that are no parameters of the kernel are options of the launch
            named = {name: x for name, x in options.items() if name in signature.parameters}
            given = signature.bind(*args, **named)
            given.apply_defaults()
            arguments = [_argument(given.arguments[name], p.annotation) for name, p in signature.parameters.items()]
            vars(self.language)["num_programs"] = lambda axis: torch.tensor(grid[axis])
            for program in itertools.product(*map(range, grid)):
                vars(self.language)["program_id"] = lambda axis, program=program: torch.tensor(program[axis])
                self.function(*arguments)

        return launch


def _argument(x, annotation):
    """Convert a kernel's argument: tensors to pointers, scalars to tensors; constexprs and None stay."""
    # annotations may be strings, if the module has `from __future__ import annotations`
    if x is None or "constexpr" in str(getattr(annotation, "__name__", annotation)):
        return x
    if not isinstance(x, Tensor):
        return torch.tensor(x)
    # the pointer of a pool with gaps between its slots also addresses the gaps
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return Pointer(x.view(-1) if x.is_contiguous() else x.as_strided((extent,), (1,)), torch.tensor(0))


def _unary(function: Callable) -> Callable:
    return lambda x: function(torch.as_tensor(x))


def _binary(function: Callable) -> Callable:
    return lambda x, y: function(torch.as_tensor(x), torch.as_tensor(y))


def constexpr(x=None):
    """Return x, the compile-time value, unchanged."""
    return x


def _where(condition: Tensor, x, y):
    """Select elementwise between two tensors or two tensors of pointers."""
    if isinstance(x, Pointer):
        return (x if condition else y) if condition.dim() == 0 else SelectedPointer(condition, x, y)
    return torch.where(*map(torch.as_tensor, (condition, x, y)))


def _mma(a, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    result = _rounded_once(a.data if isinstance(a, Shared) else a, b.data)
    return acc + result if use_acc else result


def _register_mma(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    return acc + _rounded_once(a, b)


def _rounded_once(a: Tensor, b: Tensor) -> Tensor:
    """Return the matmul a b, computed in float64 and rounded to float32: equal results on all processors."""
    return (a.double() @ b.double()).float()


def _cast(x: Tensor, dtype: torch.dtype | str) -> Tensor:
    return x.long() & 0xFFFFFFFF if dtype == _UINT32 else x.to(dtype)


def _cumulative_sum(x: Tensor, axis: int, combine: Callable, reverse: bool = False) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def _sums(values: Sequence[Tensor], axis: int, combine: Callable) -> tuple[Tensor, ...]:
    return tuple(x.sum(axis) for x in values)


_ASSEMBLY: dict[str, Callable] = {
    "lg2": torch.log2,
    "rcp": torch.reciprocal,
    "mul": lambda x, y: x.long() * y.long(),
    "prmt": lambda x: (x << 16 * (1 - torch.arange(x.shape[-1], dtype=x.dtype) % 2) >> 31).to(torch.int16),
    "lop3": lambda mask, x, other: torch.where(mask != 0, x, other),
}


def _assembly(asm: str, constraints: str, args: Sequence[Tensor], **options) -> Tensor | None:
    """Emulate the instructions in `_ASSEMBLY`; for all others return the first argument, or None without arguments.

    "prmt" gives the sign (0 or −1) of a word's low half in even columns, and of its high half in odd columns.
    """
    return _ASSEMBLY.get(asm.partition(".")[0], lambda x=None, *_: x)(*args)


def _language() -> ModuleType:
    gl = ModuleType("language")
    same = ("float32", "bfloat16", "float16", "int16", "int32", "int64", "abs", "reshape")
    functions = {
        "constexpr": constexpr,
        "shared_memory_descriptor": Shared,
        **{name: getattr(torch, name) for name in same},
        "uint32": _UINT32,
        "arange": lambda start, end, layout: torch.arange(start, end),
        "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        "allocate_shared_memory": _allocate,
        "warp_specialize": _warp_specialize,
        "load": lambda p, mask=None, other=0.0: p.load(mask, other),
        "store": lambda p, x, mask=None: p.store(
            x if isinstance(x, Tensor) else torch.tensor(x, dtype=p.base.dtype), mask
        ),
        "minimum": _binary(torch.minimum),
        "maximum": _binary(torch.maximum),
        "exp2": _unary(torch.exp2),
        "log2": _unary(torch.log2),
        "rsqrt": _unary(torch.rsqrt),
        "where": _where,
        "multiple_of": lambda x, values: x,
        "sum": lambda x, axis: x.sum(axis),
        "max": lambda x, axis: x.amax(axis),
        "min": lambda x, axis: x.amin(axis),
        "inline_asm_elementwise": _assembly,
        "associative_scan": _cumulative_sum,
        "reduce": _sums,
        "expand_dims": torch.unsqueeze,
        "cast": _cast,
        "join": lambda x, y: torch.stack((x, y), -1),
        "split": lambda x: x.unbind(-1),
        "cdiv": lambda x, y: (x + y - 1) // y,
        "convert_layout": lambda x, layout: x,
        "static_range": range,
        "barrier": lambda: None,
        "num_warps": lambda: 4,
    }
    layouts = ("Blocked", "Slice", "DotOperand", "NVMMADistributed", "NVMMAShared", "SwizzledShared")
    functions |= {f"{name}Layout": lambda *args: None for name in layouts}
    for name, function in functions.items():
        setattr(gl, name, function)
    return gl


def _emulated_modules() -> dict[str, ModuleType]:
    gluon, gl, ampere, hopper = ModuleType("gluon"), _language(), ModuleType("ampere"), ModuleType("hopper")
    vars(gluon).update(
        language=gl,
        constexpr_function=lambda function: function,
        jit=lambda function=None, **_: Jit(function, gl) if function else lambda function: Jit(function, gl),
    )
    async_copy = SimpleNamespace(
        async_load=lambda shared, p, mask=None: shared.store(p.load(mask)),
        commit_group=lambda: None,
        wait_group=lambda outstanding: None,
        # all 128 threads of four warps arrive
        mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(128),
    )
    vars(ampere).update(async_copy=async_copy, mma_v2=_register_mma)
    vars(hopper).update(
        async_copy=async_copy,
        mbarrier=SimpleNamespace(
            init=Barrier.init, arrive=Barrier.arrive, wait=Barrier.wait, MBarrierLayout=lambda: None
        ),
        fence_async_shared=lambda: None,
        warpgroup_mma=_mma,
        warpgroup_mma_wait=lambda outstanding, deps: deps[0] if len(deps) == 1 else tuple(deps),
    )
    language = f"{_GLUON}.language"
    pdl = ModuleType("cuda")
    vars(pdl).update(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    return {
        _CUDA: pdl,
        _GLUON: gluon,
        language: gl,
        f"{language}.nvidia.ampere": ampere,
        f"{language}.nvidia.hopper": hopper,
    }


def _rebound(function: Any, language: ModuleType) -> FunctionType:
    """Return a Triton device function as a Python function; the device functions that it calls are emulated too."""
    python = function.fn
    scope = python.__globals__
    known = {name: scope[name] for name in python.__code__.co_names if name in scope}
    return FunctionType(python.__code__, scope | _usable(known, language) | {"tl": language}, python.__name__)


def _usable(names: Mapping[str, Any], language: ModuleType) -> dict[str, Any]:
    """Return replacements for Triton objects in a namespace: values of constexprs, and emulated device functions."""
    out: dict[str, Any] = {}
    for name, x in names.items():
        if isinstance(x, triton.language.constexpr):
            out[name] = x.value
        elif isinstance(x, triton.runtime.jit.KernelInterface):
            out[name] = _rebound(x, language)
        elif (
            isinstance(x, ModuleType) and x.__name__.startswith("tokenmix_") and (inside := _usable(vars(x), language))
        ):
            out[name] = SimpleNamespace(**vars(x) | inside)
    return out


def _steps(*bounds) -> Iterator[Tensor]:
    """Replacement of `range` in kernels: yield the loop variable as a tensor."""
    return (torch.tensor(i) for i in range(*map(int, bounds)))


def load(package: str, *modules: str, shared: tuple[str, ...] = ()) -> list[ModuleType]:
    """Import modules of kernels and launchers a second time, so that they use the emulator; return these modules.

    Modules that they import are also imported again if they are in `package` or begin with a prefix in `shared`;
    `sys.modules` is restored afterwards. Triton device functions that the returned modules and `kernels.gluon.hopper`
    import also run on the emulator. Modules with torch operators are not imported again: a second registration would
    replace the first one.
    """
    prefixes = (f"{package}.", _GLUON, _CUDA, *shared)
    before = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith(prefixes) and not any(isinstance(x, CustomOpDef) for x in vars(module).values())
    }
    attributes = dict(vars(importlib.import_module(package)))
    # also remove the modules from their parents: `from parent import module` looks there before `sys.modules`
    parents = [(vars(sys.modules[parent]), leaf) for parent, _, leaf in (x.rpartition(".") for x in before)]
    of_parents = [(parent, leaf, parent.pop(leaf)) for parent, leaf in parents if leaf in parent]
    for name in before:
        del sys.modules[name]
    kept = {name for name in sys.modules if name.startswith(prefixes)}
    emulated = _emulated_modules()
    sys.modules.update(emulated)
    # `from triton.experimental import gluon` also looks at this attribute before it looks in `sys.modules`
    experimental = vars(importlib.import_module("triton.experimental"))
    real = experimental.pop("gluon", None)
    try:
        language = emulated[f"{_GLUON}.language"]
        common = vars(importlib.import_module("tokenmix_core.kernels.gluon.hopper"))
        if common["gl"] is language:
            common.update(_usable(common, language))
        loaded = [importlib.import_module(f"{package}.{name}") for name in modules]
        for module in loaded:
            vars(module).update(_usable(vars(module), language), range=_steps)
    finally:
        for name in [name for name in sys.modules if name.startswith(prefixes) and name not in kept]:
            del sys.modules[name]
        sys.modules.update(before)
        if real is not None:
            experimental["gluon"] = real
        # restore the attributes that the second import set on the package
        parent = vars(sys.modules[package])
        for name in parent.keys() - attributes:
            del parent[name]
        parent.update(attributes)
        for parent, leaf, value in of_parents:
            parent[leaf] = value
    return loaded
