"""Names of torch and Triton that no documentation promises: nothing else in the packages touches them.

Each can be missing: then results stay what they are, and what is slower is said once, by a warning at the first launch
on a GPU. Gluon, the language that kernels for Hopper are written in, is none of them: see `ops.dispatch`.
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

# what is lost without a name
_RECORDING = "calls are not recorded"
_OWN_LAUNCH = "Triton launches every kernel itself, and calls are not recorded"
_DISPATCHER = "every call goes through torch's dispatcher"
_ONE_BY_ONE = "kernels are compiled one after the other"

# `module:name`, and what is lost without
NAMES = {
    "torch._C:_cuda_getDevice": "the device is asked for through torch.cuda",
    "torch._C:_cuda_getCurrentRawStream": "the stream is asked for through torch.cuda",
    "torch._C:_len_torch_dispatch_stack": _DISPATCHER + ", and calls are not recorded",
    "torch._C:_FunctionBase.apply": "calls with gradients are checked for transforms of functions",
    "torch._C._dynamo.guards:_empty_strided_cuda": "buffers are made by torch.empty_strided",
    "torch._C._dynamo.guards:TensorGuards": "calls are compared with recorded ones in Python",
    "torch.utils._python_dispatch:TorchDispatchMode": _RECORDING,
    "torch.utils._python_dispatch:TorchDispatchMode._should_skip_dynamo": "the first call imports torch's compiler",
    "torch:UntypedStorage._cdata": "memory is told apart by its address",
    "torch._ops:OpOverload.tags": _RECORDING,
    "torch.autograd.forward_ad:_current_level": "calls without gradients take the way of those with them",
    "torch._C._functorch:peek_interpreter_stack": "results of attention are merged by torch's operations",
    "torch.nn.modules.module:_has_any_global_hook": "layers are called one by one",
    "triton.knobs:runtime": _OWN_LAUNCH,
    "triton.runtime.driver:driver": _OWN_LAUNCH,
    "triton.runtime.build:compile_module_from_src": _OWN_LAUNCH,
    "triton.backends.nvidia.driver:include_dirs": _OWN_LAUNCH,
    "triton.compiler.compiler:max_shared_mem": _OWN_LAUNCH,
    "triton:JITFunction.warmup": _OWN_LAUNCH,
    "triton.knobs:nvidia": "Gluon's kernels may spill",
    "triton:JITFunction.is_gluon": "Gluon's kernels may spill",
    "triton.errors:TritonError": "kernels in Gluon that do not compile end in an error, not in portable ones",
    "triton.runtime.cache:triton_key": "Triton's compiler is hashed at the first compilation",
    "triton:AsyncCompileMode": _ONE_BY_ONE,
    "triton:FutureKernel": _ONE_BY_ONE,
}

# attributes that objects were seen to lack, and what is lost
_lacking: dict[str, str] = {}


@functools.cache
def find(name: str) -> Any:
    """The object that one of `NAMES` stands for; None where it is missing."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def missing() -> dict[str, str]:
    """Which of `NAMES`, and of the attributes that were needed so far, are missing, and what is lost."""
    # torch for CPUs has no names for GPUs
    asked = [name for name in NAMES if "cuda" not in name or torch.backends.cuda.is_built()]
    return {name.replace(":", "."): NAMES[name] for name in asked if find(name) is None} | _lacking


@functools.cache
def say_what_is_missing() -> None:
    """Warn, once, of what is slower for want of a name."""
    if lost := missing():
        import triton

        names = "; ".join(f"{name} ({what})" for name, what in lost.items())
        warnings.warn(
            f"torch {torch.__version__} and Triton {triton.__version__} lack names that tokenmix saves time by: "
            f"results are the same, calls take longer: {names}",
            RuntimeWarning,
            stacklevel=2,
        )


def _lacks(of: str, error: AttributeError, lost: str) -> None:
    """Note that an object has not what was asked of it."""
    _lacking[f"{of}.{error.name}"] = lost


def _device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream if torch.cuda.is_available() else 0


def _torch_empty(size: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


_Mode: Any = find("torch.utils._python_dispatch:TorchDispatchMode") or object


class Mode(_Mode):
    """Sees every operation of torch; without torch's own, nothing, and is not entered: see `records`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is traced here, and saying so to torch's compiler would import it, which takes seconds
        return False


# the device and the stream that kernels are launched on, asked as Triton's driver does but without its Python
current_device: Callable[[], int] = find("torch._C:_cuda_getDevice") or _device
current_stream: Callable[[int], int] = find("torch._C:_cuda_getCurrentRawStream") or _stream
# how many modes see every operation of torch; more than our own, where nobody knows
modes: Callable[[], int] = find("torch._C:_len_torch_dispatch_stack") or (lambda: 2)
# what torch's compiled code makes its buffers by, in less than half the time: size, stride, dtype
empty: Callable[..., Tensor] = find("torch._C._dynamo.guards:_empty_strided_cuda") or _torch_empty
# what torch's compiled code compares tensors with those that it was compiled for by, or None
Guards: Any = find("torch._C._dynamo.guards:TensorGuards")
# whether there is all of torch that recording needs
records: bool = _Mode is not object and find("torch._ops:OpOverload.tags") is not None

_KNOWS_LEVELS = find("torch.autograd.forward_ad:_current_level") is not None
_KNOWS_STORAGES = find("torch:UntypedStorage._cdata") is not None


def constant_when_traced(fn: Callable) -> Callable:
    """Mark a function whose result torch.compile takes for a constant.

    As `torch.compiler.assume_constant_result` does it, which would import torch's compiler: seconds of every start.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def storage(x: Tensor) -> Any:
    """A mark that tensors share if they lie in the same memory."""
    if _KNOWS_STORAGES:
        return x.untyped_storage()._cdata
    # empty ones have no address, and nothing to tell apart
    return x.untyped_storage().data_ptr() or (x.dtype, x.device)


def forward_mode() -> bool:
    """Tell whether forward-mode derivatives may be asked for."""
    return not _KNOWS_LEVELS or torch.autograd.forward_ad._current_level >= 0


_transform = find("torch._C._functorch:peek_interpreter_stack")


def transformed() -> bool:
    """Tell whether forward-mode derivatives or a transform of functions may be under way, which see no kernels."""
    return forward_mode() or _transform is None or _transform() is not None


_any_global_hook = find("torch.nn.modules.module:_has_any_global_hook")


def watches_all_modules() -> bool:
    """Tell whether somebody may have asked torch to tell of the calls of all modules."""
    return _any_global_hook is None or _any_global_hook()


@contextmanager
def call_replaced(module: torch.nn.Module, change: Callable[[Callable], Callable]) -> Iterator[None]:
    """Within it, calling a module makes `change(call)` of what the call did before, its hooks included.

    It is stored where `Module.compile` stores the compiled call, which every call looks up.
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
    """`function.apply` without its first part, which is for transforms of functions."""
    direct = find("torch._C:_FunctionBase.apply") is not None
    base: Any = super(torch.autograd.Function, function)
    return base.apply if direct else function.apply


class Operation(NamedTuple):
    """Effects of an operation: it gives a view, makes a tensor, has sizes or numbers that depend on numbers."""

    views: bool
    makes: bool
    by_value: bool


_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def operation(func: Any) -> Operation | None:
    """The effects of an operation that a mode is shown; None where they cannot be known."""
    try:
        makes = all(x.alias_info is None for x in func._schema.returns)
        return Operation(func.is_view, makes, not _BY_VALUE.isdisjoint(func.tags))
    except AttributeError as error:
        _lacks("torch._ops.OpOverload", error, _RECORDING)
        return None


def composed(func: Any, args: tuple, kwargs: dict) -> Any:
    """The result of an operation that is made of others, by these others; NotImplemented for others, or if unknown."""
    decompose = getattr(func, "decompose", None)
    return NotImplemented if decompose is None else decompose(*args, **kwargs)


class Launching(NamedTuple):
    """The parts of Triton that launches need which are not made by Triton itself."""

    driver: Any
    build: Callable[..., Any]
    include_dirs: Any
    most_shared: Callable[[int], int]


@functools.cache
def launching() -> Launching | None:
    """The parts of Triton that own launches need; None where Triton has to make the launches."""
    if any(find(name) is None for name, lost in NAMES.items() if lost == _OWN_LAUNCH):
        return None
    return Launching(
        driver=find("triton.runtime.driver:driver"),
        build=find("triton.runtime.build:compile_module_from_src"),
        include_dirs=find("triton.backends.nvidia.driver:include_dirs"),
        most_shared=find("triton.compiler.compiler:max_shared_mem"),
    )


@functools.cache
def observing() -> Callable[[], Any]:
    """`observed()`, true where something, such as a profiler, wants to be told of launches by Triton itself."""
    if find("triton.knobs:runtime") is None:
        return lambda: True
    from triton import knobs

    def observed() -> Any:
        try:
            runtime = knobs.runtime
            return runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        except AttributeError as error:
            _lacks("triton.knobs.runtime", error, _OWN_LAUNCH)
            return True

    return observed


# From 3.9 on Triton assembles for Hopper with CUDA 13's ptxas, and asks it for another allocator of registers than its
# own choice: Gluon's kernels, whose registers are counted, then spill, and GDN and SSD take up to 17 % longer. This is
# its own choice again, under which their tests pass, too.
_ALLOCATOR = "--regAllocOptLevel=4"


def choose_compiler_options(kernel: Any) -> None:
    """Let a kernel be compiled as those were that were measured, where Triton would do otherwise.

    A product and a sum are one instruction, as Triton makes them up to 3.9, which warns that 3.10 will not. ptxas
    allocates a Gluon kernel's registers as it would by itself, where Triton 3.9 tells it otherwise. What the user has
    set for either stands.
    """
    import triton

    chosen: dict[str, Any] = {} if "TRITON_DEFAULT_FP_FUSION" in os.environ else {"enable_fp_fusion": True}
    gluon = find("triton:JITFunction.is_gluon") is not None and kernel.is_gluon()
    # absent and empty are alike: nothing was asked for
    asked = getattr(find("triton.knobs:nvidia"), "ptxas_options", None)
    if gluon and not asked and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        chosen["ptx_options"] = _ALLOCATOR
    # every way to compile or to launch it ends there
    kernel.run = functools.partial(kernel.run, **chosen)


def is_of_compiler(error: Exception) -> bool:
    """Tell whether an error is what Triton's compiler says of a kernel."""
    kind = find("triton.errors:TritonError")
    # passes over a kernel's code fail with a plain RuntimeError
    return (kind is not None and isinstance(error, kind)) or "PassManager::run failed" in str(error)


def prepare() -> list[Callable[[], Any]]:
    """The steps that Triton takes before a first kernel, each of which can be taken ahead, mostly outside Python."""
    names = launching()
    first = [] if names is None else [lambda: names.driver.active]
    key = find("triton.runtime.cache:triton_key")
    return first if key is None else [*first, key]


def side_by_side() -> Callable[..., Any] | None:
    """`mode(pool, ignore_errors=True)`, inside of which kernels are compiled in a pool; None where Triton cannot."""
    usable = launching() is not None and find("triton:FutureKernel") is not None
    return find("triton:AsyncCompileMode") if usable else None


def result(compiled: Any) -> Any:
    """A compiled kernel; of one that is compiled side by side with others, once it is."""
    future = find("triton:FutureKernel")
    return compiled.result() if future is not None and isinstance(compiled, future) else compiled


def drop(kernel: Any, failed: Any) -> None:
    """Let a kernel forget what did not compile beside others: else a launch would wait for that, and not try again."""
    for compiled, *_ in kernel.device_caches.values():
        for key in [key for key, value in compiled.items() if value is failed]:
            del compiled[key]


def kernels_of(kernel: Any) -> Iterable[Any]:
    """All compiled forms of a kernel, in this process."""
    for compiled, *_ in kernel.device_caches.values():
        yield from compiled.values()


def can_drop(kernel: Any) -> bool:
    """Tell whether `drop` can be asked for."""
    if hasattr(kernel, "device_caches"):
        return True
    _lacking["triton.JITFunction.device_caches"] = _ONE_BY_ONE
    return False


def argument_names(kernel: Any) -> list[str]:
    """The names of a kernel's parameters, in order."""
    names = getattr(kernel, "arg_names", None)
    # a kernel is a Python function inside
    return list(inspect.signature(kernel.fn).parameters if names is None else names)


def compiled_in(kernel: Any) -> list[bool]:
    """Which of a kernel's parameters are compiled in; all of them, where Triton does not say."""
    params = getattr(kernel, "params", None)
    if params is None:
        return [True] * len(argument_names(kernel))
    return [bool(x.is_constexpr) for x in params]


def unspecialised(kernel: Any, names: list[str]) -> Any:
    """The kernel, compiled without regard to the values of these numbers; None where Triton cannot."""
    if getattr(kernel, "params", None) is None:
        return None
    made = type(kernel)(kernel.fn, do_not_specialize=names)
    choose_compiler_options(made)
    return made


class Described(NamedTuple):
    """A compiled kernel as Triton describes it.

    Attributes:
        name: its function's.
        binary: machine code.
        types: of its arguments.
        backend: "cuda", or another.
        warps: a program's.
        ctas: programs of a cluster.
        shared: bytes of shared memory.
        early: whether it may begin before the launch ahead of it has ended.
        more: whether a launch has to bring more than arguments.
    """

    name: str
    binary: bytes
    types: list[Any]
    backend: str
    warps: int
    ctas: int
    shared: int
    early: bool
    more: bool


def described(kernel: Any) -> Described | None:
    """The facts of a compiled kernel that own launches need; None where Triton does not say them."""
    try:
        x, types = kernel.metadata, list(kernel.src.signature.values())
        # of these, not every version has the last two
        more = x.global_scratch_size or x.profile_scratch_size
        more = more or any(getattr(x, name, 0) for name in ("instrumentation_mode", "launch_cooperative_grid"))
        sizes = x.target.backend, x.num_warps, x.num_ctas, x.shared
        return Described(kernel.name, kernel.kernel, types, *sizes, bool(getattr(x, "launch_pdl", False)), bool(more))
    except AttributeError as error:
        _lacks("triton's compiled kernel", error, _OWN_LAUNCH)
        return None


def put_on_device(kernel: Described, device: int) -> tuple[int, int] | None:
    """CUDA's handle of a kernel's function, and the most threads its programs may have; None where Triton cannot."""
    names = launching()
    if names is None:
        return None
    try:
        load = names.driver.active.utils.load_binary
    except AttributeError as error:
        _lacks("triton.runtime.driver.driver.active", error, _OWN_LAUNCH)
        return None
    _, function, _, _, most = load(kernel.name, kernel.binary, kernel.shared, device)
    return function, most
