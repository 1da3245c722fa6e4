"""An emulator of CUDA graphs for any device: it captures the operations of a function, and replays them.

Like a CUDA graph, a capture fixes all Python values, reads and writes the tensors that existed at capture, and must not
wait for the device (unless `eager`, for eager forms of operations that read values). Unlike a graph, it has no streams
and allocates each temporary tensor separately, so it cannot show errors from the reuse of a graph's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tokenmix_core.kernels.launch import cuda_graphs

_aten = torch.ops.aten
# operations by which the host reads from a device, or whose output sizes depend on values on a device
_READS = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.is_nonzero.default,
    _aten.equal.default, _aten._unique2.default, _aten.repeat_interleave.Tensor, _aten.bincount.default,
    _aten.multinomial.default,
}  # fmt: skip
# operations that copy Python values to a device from host memory, which may have changed before a replay
_UPLOADS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class HostRead(AssertionError):
    """The error that captured work has read from the device, or has copied a Python value to it."""


class _NoReads(TorchFunctionMode):
    """Raises an error for functions that read from the device without torch's dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.tolist, Tensor.numpy):
            raise HostRead(f"{func.__name__} of a tensor {list(args[0].shape)}")
        return func(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    """Runs operations, and raises an error for those that a CUDA graph cannot capture.

    Args:
        seen: called after each operation with the operation, its arguments and its outputs.
        before: called before each operation with the operation and its arguments.
        eager: whether operations may copy values between tensors and Python, as eager operations do; replays use the
            values of the capture.
    """

    def __init__(
        self,
        seen: Callable[[Any, tuple, dict, Any], None] | None = None,
        before: Callable | None = None,
        *,
        eager: bool = False,
    ):
        super().__init__()
        self.seen, self.before, self.eager = seen, before, eager

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        indices = [x for x in tree_flatten(args[1:2])[0] if isinstance(x, Tensor)] if func in _INDEXING else []
        masked = any(x.dtype == torch.bool for x in indices)
        sized = func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
        if (masked or (func in _READS and not sized)) and not self.eager:
            raise HostRead(f"{func} waits for the device")
        if func in _UPLOADS and not self.eager:
            raise HostRead(f"{func} copies values of Python to the device")
        if self.before is not None:
            self.before(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.seen is not None:
            self.seen(func, args, kwargs, out)
        return out

    def __enter__(self):
        self._functions = nullcontext() if self.eager else _NoReads()
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._functions.__exit__(*error)


def capture_work(work: Callable[[], object], *, eager: bool = False) -> Callable[[], object]:
    """Capture `work` and return a function that replays it; after the capture, tensors that `work` wrote are restored.

    A replay allocates new temporary tensors, but writes into the same returned tensors as the capture, as a graph does.
    `eager` is the same as for `Watched`.
    """
    tape: list[tuple[Any, Callable, Callable, list]] = []
    # keep references to all tensors that operations made: the `id` of a freed tensor may be reused
    made: dict[int, Tensor] = {}
    new: dict[int, Any] = {}
    own: set[int] = set()
    saved: dict[int, tuple[Tensor, Tensor]] = {}

    def before(func, args, kwargs):
        for argument, x in _with_schema(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for t in [t for t in tree_flatten(x)[0] if isinstance(t, Tensor)]:
                    storage = t.untyped_storage()
                    if storage.data_ptr() not in own and storage.data_ptr() not in saved:
                        whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)  # type: ignore[arg-type]
                        saved[storage.data_ptr()] = whole, whole.clone()

    def seen(func, args, kwargs, out):
        given = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        outputs = _several(out)
        tape.append((func, _found(args, made, new), _found(kwargs, made, new), [id(t) for t in outputs]))
        for t in outputs:
            if isinstance(t, Tensor):
                made[id(t)] = t
                if t.untyped_storage().data_ptr() not in given:
                    own.add(t.untyped_storage().data_ptr())

    generator = torch.get_rng_state()
    with Watched(seen, before, eager=eager):
        results = work()
    torch.set_rng_state(generator)
    # find gradients by address: a parameter's gradient may be another tensor object with the memory of a made tensor
    slots = {(t.data_ptr(), t.shape): key for key, t in made.items()}
    returned = [t.detach() for t in tree_flatten(results)[0] if isinstance(t, Tensor)]
    returned = [(t, slots[t.data_ptr(), t.shape]) for t in returned if (t.data_ptr(), t.shape) in slots]
    for whole, copy in saved.values():
        whole.copy_(copy)

    def repeat() -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in tape:
                out = func(*args(), **kwargs())
                for old, x in zip(outputs, _several(out), strict=True):
                    new[old] = x
            for t, key in returned:
                t.copy_(new[key])
        new.clear()

    return repeat


def _several(out: Any) -> list | tuple:
    """Return the outputs of an operation as a sequence; an operation that returns a Python value has none."""
    return out if isinstance(out, list | tuple) else [out] if isinstance(out, Tensor) else []


def _found(x: Any, made: dict[int, Tensor], new: dict[int, Any]) -> Callable[[], Any]:
    """Return a function that returns a replay's argument: x, with the replay's tensors in place of those in `made`."""
    if isinstance(x, Tensor):
        key = id(x)
        return (lambda: new[key]) if key in made else (lambda: x)
    if isinstance(x, dict):
        items = {name: _found(y, made, new) for name, y in x.items()}
        return (lambda: {name: y() for name, y in items.items()}) if items else (lambda: x)
    if isinstance(x, list | tuple) and any(isinstance(y, Tensor | list | tuple) for y in x):
        parts = [_found(y, made, new) for y in x]
        return lambda: [y() for y in parts]
    return lambda: x


def _with_schema(func, args, kwargs):
    parameters = func._schema.arguments
    yield from zip(parameters, args, strict=False)
    yield from ((p, kwargs[p.name]) for p in parameters if p.name in kwargs)


@contextmanager
def graphs_everywhere(*, eager: bool = False) -> Iterator[list]:
    """Context manager: on every device, decoding steps and training passes are captured and replayed as on CUDA.

    Yields a list to which each captured function is appended. `eager` is the same as for `Watched`.
    """
    works: list[Callable[[], object]] = []

    def capture(work: Callable[[], object]) -> Callable[[], object]:
        works.append(work)
        return capture_work(work, eager=eager)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "capture_on", lambda device: capture)
        patch.setattr(cuda_graphs, "wanted", lambda: True)
        yield works


def assert_graphs_train_alike(recipe: Any, folder: Path, *, steps: int = 8, tolerance: float = 1e-3) -> None:
    """Assert that a GPU captures a recipe's steps as CUDA graphs, with the losses and gradient norms of eager steps."""
    from tokenmix_core.training.callbacks import read_metrics
    from tokenmix_core.training.folder import METRICS
    from tokenmix_core.training.recipe import Tokens
    from tokenmix_core.training.trainer import train

    curves, captures = [], []
    tokens = Tokens(steps * recipe.optimizer.batch_tokens)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, total_tokens=tokens, warmup_tokens=Tokens(0)))

    def counted(device: torch.device):
        capture = cuda_graphs.captures_cuda(device)
        return lambda work: captures.append(capture(work)) or captures[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "capture_on", counted)
        for wanted in ("never", "always"):
            run = replace(recipe.run, training_graph=wanted, logging_steps=1)
            train(replace(recipe, run=run), folder / wanted, progress=False)
            lines = [x for x in read_metrics(folder / wanted / METRICS) if "loss" in x]
            curves.append([x[name] for x in lines for name in ("loss", "grad_norm")])
            assert not captures or wanted == "always"
    several = recipe.optimizer.batch_tokens > recipe.optimizer.micro_batch_tokens
    assert len(captures) >= (2 if several else 1)
    assert curves[1] == pytest.approx(curves[0], rel=tolerance)
