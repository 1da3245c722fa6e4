"""The only module that uses undocumented names of torch and Triton.

If a name is missing, results do not change, and one warning at the first launch on a GPU names the slower parts.
Gluon is handled elsewhere (`ops.dispatch`).
"""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

# texts of the warning: the consequence of a missing name
_CACHING = "calls are not cached"
OWN_LAUNCH = "Triton launches every kernel itself, and calls are not cached"
_DISPATCHER = "every call goes through torch's dispatcher"
_SEQUENTIAL = "kernels are compiled one after the other"

# maps `module:name` to the consequence if it is missing
NAMES = {
    "torch._C:_cuda_getDevice": "the device is queried through torch.cuda",
    "torch._C:_cuda_getCurrentRawStream": "the stream is queried through torch.cuda",
    "torch._C:_len_torch_dispatch_stack": _DISPATCHER + ", and calls are not cached",
    "torch._C:_FunctionBase.apply": "calls with gradients are checked for transforms of functions",
    "torch._C._dynamo.guards:_empty_strided_cuda": "buffers are allocated by torch.empty_strided",
    "torch._C._dynamo.guards:TensorGuards": "signatures are compared in Python",
    "torch.utils._python_dispatch:TorchDispatchMode": _CACHING,
    "torch.utils._python_dispatch:TorchDispatchMode._should_skip_dynamo": "the first call imports torch's compiler",
    "torch:UntypedStorage._cdata": "storages are identified by their address",
    "torch._ops:OpOverload.tags": _CACHING,
    "torch.autograd.forward_ad:_current_level": "calls without gradients take the path of those with them",
    "torch._C._functorch:peek_interpreter_stack": "results of attention are merged by torch's operations",
    "torch.nn.modules.module:_has_any_global_hook": "layers are called one by one",
    "triton.knobs:runtime": OWN_LAUNCH,
    "triton.runtime.driver:driver": OWN_LAUNCH,
    "triton.runtime.build:compile_module_from_src": OWN_LAUNCH,
    "triton.backends.nvidia.driver:include_dirs": OWN_LAUNCH,
    "triton.compiler.compiler:max_shared_mem": OWN_LAUNCH,
    "triton:JITFunction.warmup": OWN_LAUNCH,
    "triton.knobs:nvidia": "Gluon's kernels may spill",
    "triton:JITFunction.is_gluon": "Gluon's kernels may spill",
    "triton.errors:TritonError": "Gluon kernels that do not compile raise an error instead of falling back",
    "triton.runtime.cache:triton_key": "Triton's compiler is hashed at the first compilation",
    "triton:AsyncCompileMode": _SEQUENTIAL,
    "triton:FutureKernel": _SEQUENTIAL,
}

# maps `object.attribute` to the consequence, for attributes that were found missing
_lacking: dict[str, str] = {}


@functools.cache
def find(name: str) -> Any:
    """Return the object of one of `NAMES`; None if it is missing."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def missing() -> dict[str, str]:
    """Return the missing `NAMES`, and the missing attributes that code has asked for, each with its consequence."""
    # torch builds for CPUs lack the names for GPUs, so do not report these
    asked = [name for name in NAMES if "cuda" not in name or torch.backends.cuda.is_built()]
    return {name.replace(":", "."): NAMES[name] for name in asked if find(name) is None} | _lacking


@functools.cache
def warn_of_missing() -> None:
    """Warn of the names that `missing` returns and of the consequences, in one warning per process."""
    if lost := missing():
        import triton

        names = "; ".join(f"{name} ({consequence})" for name, consequence in lost.items())
        warnings.warn(
            f"torch {torch.__version__} and Triton {triton.__version__} lack names that make calls faster: "
            f"results are the same, calls take longer: {names}",
            RuntimeWarning,
            stacklevel=2,
        )


def lacks(of: str, error: AttributeError, lost: str) -> None:
    """Note that the object called `of` lacks the attribute that `error` names, and the consequence `lost`."""
    _lacking[f"{of}.{error.name}"] = lost


def _device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream if torch.cuda.is_available() else 0


def _torch_empty(size: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


_Mode: Any = find("torch.utils._python_dispatch:TorchDispatchMode") or object


class Mode(_Mode):
    """A context manager that observes every torch operation; if `captures` is false, a plain object, never entered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is traced here; this answer spares the import of torch's compiler, which takes seconds
        return False


# functions that return the current device and its current stream like Triton's driver, but without its Python code
current_device: Callable[[], int] = find("torch._C:_cuda_getDevice") or _device
current_stream: Callable[[int], int] = find("torch._C:_cuda_getCurrentRawStream") or _stream
# modes(): number of active dispatch modes; 2 if unknown, as if a mode other than our own were active
modes: Callable[[], int] = find("torch._C:_len_torch_dispatch_stack") or (lambda: 2)
# empty(size, stride, dtype): allocate a tensor as torch's compiled code does, in less than half the time of
# torch.empty_strided
empty: Callable[..., Tensor] = find("torch._C._dynamo.guards:_empty_strided_cuda") or _torch_empty
# the class with which torch's compiled code compares tensors with a signature, or None
Guards: Any = find("torch._C._dynamo.guards:TensorGuards")
# whether torch has all names that captures need
captures: bool = _Mode is not object and find("torch._ops:OpOverload.tags") is not None

_KNOWS_LEVELS = find("torch.autograd.forward_ad:_current_level") is not None
_KNOWS_STORAGES = find("torch:UntypedStorage._cdata") is not None


def constant_when_traced(fn: Callable) -> Callable:
    """Mark a function whose result torch.compile treats as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports torch's compiler, which takes seconds.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def storage(x: Tensor) -> Any:
    """Return an identifier of a tensor's storage."""
    if _KNOWS_STORAGES:
        return x.untyped_storage()._cdata
    # empty storages have no address and need no distinction
    return x.untyped_storage().data_ptr() or (x.dtype, x.device)


def forward_mode() -> bool:
    """Tell whether forward-mode derivatives may be active; True if torch does not tell."""
    return not _KNOWS_LEVELS or torch.autograd.forward_ad._current_level >= 0


_transform = find("torch._C._functorch:peek_interpreter_stack")


def in_transform() -> bool:
    """Tell whether `torch.func.grad`, `vmap` or `jvp` is active; False under torch.compile, or if unknown."""
    if torch.compiler.is_compiling() or _transform is None or (top := _transform()) is None:
        return False
    return top.key().name != "Functionalize"


def transformed() -> bool:
    """Tell whether forward-mode derivatives or a function transform may be active; neither supports kernels."""
    return forward_mode() or _transform is None or _transform() is not None


_any_global_hook = find("torch.nn.modules.module:_has_any_global_hook")


def watches_all_modules() -> bool:
    """Tell whether global module hooks may be registered; True if torch does not tell."""
    return _any_global_hook is None or _any_global_hook()


@contextmanager
def call_replaced(module: torch.nn.Module, change: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace a module's call (its forward and hooks) by `change(call)` inside the block.

    The new call is stored in `_compiled_call_impl`, which `Module.compile` sets and every call of the module looks up.
    """
    before = module.__dict__.get("_compiled_call_impl")
    module.__dict__["_compiled_call_impl"] = change(before or module._call_impl)
    try:
        yield
    finally:
        del module.__dict__["_compiled_call_impl"]
        if before is not None:
            module.__dict__["_compiled_call_impl"] = before


def direct_apply(function: Any) -> Callable:
    """Return an autograd function's `apply`, without torch's Python wrapper, which only serves function transforms.

    If this version of torch has no such `apply`, return the wrapper.
    """
    direct = find("torch._C:_FunctionBase.apply") is not None
    base: Any = super(torch.autograd.Function, function)
    return base.apply if direct else function.apply


class Operation(NamedTuple):
    """Effects of a torch operation.

    Attributes:
        views: whether it returns a view of an argument.
        makes: whether its results are new tensors.
        by_value: whether its result, or the result's size, depends on tensors' values in a way that torch cannot trace.
    """

    views: bool
    makes: bool
    by_value: bool


_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def operation(func: Any) -> Operation | None:
    """Return the effects of an operation; None if they are unknown."""
    try:
        makes = all(x.alias_info is None for x in func._schema.returns)
        return Operation(func.is_view, makes, not _BY_VALUE.isdisjoint(func.tags))
    except AttributeError as error:
        lacks("torch._ops.OpOverload", error, _CACHING)
        return None


def composed(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a composite operation by its decomposition and return the result; NotImplemented for other operations."""
    decompose = getattr(func, "decompose", None)
    return NotImplemented if decompose is None else decompose(*args, **kwargs)


class Launching(NamedTuple):
    """The parts of Triton that our own launches need."""

    driver: Any
    build: Callable[..., Any]
    include_dirs: Any
    max_shared: Callable[[int], int]


@functools.cache
def launching() -> Launching | None:
    """Return the parts of Triton that our own launches need; None if Triton must launch."""
    if any(find(name) is None for name, lost in NAMES.items() if lost == OWN_LAUNCH):
        return None
    return Launching(
        driver=find("triton.runtime.driver:driver"),
        build=find("triton.runtime.build:compile_module_from_src"),
        include_dirs=find("triton.backends.nvidia.driver:include_dirs"),
        max_shared=find("triton.compiler.compiler:max_shared_mem"),
    )


@functools.cache
def observing() -> Callable[[], Any]:
    """Return a function that tells whether a hook, such as a profiler's, observes launches by Triton."""
    if find("triton.knobs:runtime") is None:
        return lambda: True
    from triton import knobs

    def observed() -> Any:
        try:
            runtime = knobs.runtime
            return runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        except AttributeError as error:
            lacks("triton.knobs.runtime", error, OWN_LAUNCH)
            return True

    return observed


# Triton 3.9 overrides the register allocator that CUDA 13's ptxas would select for Hopper: Gluon kernels then spill,
# and the gated delta rule and SSD take up to 17 % longer. This option restores ptxas' own choice.
_ALLOCATOR = "--regAllocOptLevel=4"


def choose_compiler_options(kernel: Any) -> None:
    """Set the compiler options with which our kernels were measured, where Triton's defaults differ.

    Multiplications and additions are fused, which Triton 3.10 will no longer do by default. ptxas selects the register
    allocator of Gluon kernels, a choice that Triton 3.9 overrides. Options set by the user take precedence.
    """
    import triton

    chosen: dict[str, Any] = {} if "TRITON_DEFAULT_FP_FUSION" in os.environ else {"enable_fp_fusion": True}
    # a missing or empty `ptxas_options` means that the user has set no options
    asked = getattr(find("triton.knobs:nvidia"), "ptxas_options", None)
    gluon = getattr(kernel, "is_gluon", bool)()
    if gluon and not asked and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        chosen["ptx_options"] = _ALLOCATOR
    # pass the options through `run`, which every compilation and launch calls
    run = functools.partial(kernel.run, **chosen)
    # AMD's compiler refuses the option that limits registers
    kernel.run = (lambda *args, maxnreg=None, **options: run(*args, **options)) if torch.version.hip else run


def prepare() -> list[Callable[[], Any]]:
    """Return functions that do the work Triton needs once, before the first kernel; they run mostly outside Python."""
    names = launching()
    first = [] if names is None else [lambda: names.driver.active]
    key = find("triton.runtime.cache:triton_key")
    return first if key is None else [*first, key]


def parallel_compilation() -> Callable[..., Any] | None:
    """Return the context manager `mode(pool, ignore_errors=True)`, which compiles in a thread pool; None if missing."""
    return find("triton:AsyncCompileMode") if launching() is not None and find("triton:FutureKernel") else None


def result(compiled: Any) -> Any:
    """Return a compiled kernel; wait if a thread pool is still compiling it."""
    future = find("triton:FutureKernel")
    return compiled.result() if future is not None and isinstance(compiled, future) else compiled


def drop(kernel: Any, failed: Any) -> None:
    """Remove a failed parallel compilation from a kernel's cache, so that a launch compiles it again."""
    for compiled, *_ in kernel.device_caches.values():
        for key in [key for key, value in compiled.items() if value is failed]:
            del compiled[key]


def kernels_of(kernel: Any) -> Iterable[Any]:
    """Yield the compiled kernels that this process has made from a `JITFunction`."""
    for compiled, *_ in kernel.device_caches.values():
        yield from compiled.values()


def can_drop(kernel: Any) -> bool:
    """Tell whether `drop` works for this kernel, and note the missing attribute if not."""
    if hasattr(kernel, "device_caches"):
        return True
    _lacking["triton.JITFunction.device_caches"] = _SEQUENTIAL
    return False


def argument_names(kernel: Any) -> list[str]:
    """Return the names of a kernel's parameters, in order."""
    names = getattr(kernel, "arg_names", None)
    return list(inspect.signature(kernel.fn).parameters if names is None else names)


def constexprs(kernel: Any) -> list[bool]:
    """Tell for each of a kernel's parameters whether it is a constexpr; true for all if Triton does not tell."""
    params = getattr(kernel, "params", None)
    return [True] * len(argument_names(kernel)) if params is None else [bool(x.is_constexpr) for x in params]


def declared_unspecialised(kernel: Any) -> list[bool]:
    """Tell which of a kernel's parameters it declares in `do_not_specialize`; none of them if Triton does not tell."""
    params = getattr(kernel, "params", None) or [None] * len(argument_names(kernel))
    return [bool(getattr(x, "do_not_specialize", False)) for x in params]


def unspecialised(kernel: Any, names: list[str]) -> Any:
    """Return a copy of the kernel that does not specialise the parameters `names`; None if Triton lacks the means.

    Parameters that the kernel itself declares in `do_not_specialize` stay unspecialised.
    """
    if getattr(kernel, "params", None) is None:
        return None
    given = zip(argument_names(kernel), declared_unspecialised(kernel), strict=True)
    made = type(kernel)(kernel.fn, do_not_specialize=[*names, *(name for name, declared in given if declared)])
    choose_compiler_options(made)
    return made
