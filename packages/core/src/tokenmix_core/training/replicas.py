"""Micro-batches of data-parallel training without hooks: whole weights on each rank, one exchange at a step's end.

DDP averages gradients in hooks of an eager backward pass, and FSDP2 gathers weights in hooks of both passes. A replay
of a CUDA graph calls no hooks, and on a slow host hooks take longer than kernels. So the classes here run passes on a
module with plain parameters, and communicate between passes: they gather weights before the first micro-batch of a step
(FSDP2), and average gradients after the last one. This does not overlap with computation: gradients of 380M parameters
take 1.5 GB, some milliseconds over NVLink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

# elements to which each tensor in a buffer is padded: 256 bytes in float32, for vectorised loads
_ALIGNMENT = 64
# bytes of gradients that one collective averages
_GROUP_BYTES = 2**28


class AveragedGradients:
    """The gradients of a replica's parameters, which collectives average in groups.

    Args:
        parameters: all parameters of the model, in the same order on all ranks; frozen ones have no gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        # consecutive trainable parameters of one dtype and device
        self._groups: list[list[nn.Parameter]] = []
        for p in self._parameters:
            if p.requires_grad:
                last = self._groups[-1] if self._groups else []
                fits = sum(x.nbytes for x in last) + p.nbytes <= _GROUP_BYTES
                if last and fits and (last[0].dtype, last[0].device) == (p.dtype, p.device):
                    last.append(p)
                else:
                    self._groups.append([p])
        # a buffer and its views for each group, if gradients have fixed addresses
        self._fixed: list[tuple[Tensor, list[Tensor]]] | None = None

    def fixed(self) -> list[Tensor | None]:
        """Return memory for the gradient of each parameter, None if it is frozen, from which `average` reads."""
        self._fixed = [_views(group, [p.shape for p in group]) for group in self._groups]
        found = iter([view for _, views in self._fixed for view in views])
        return [next(found) if p.requires_grad else None for p in self._parameters]

    def average(self) -> None:
        """Replace each gradient by its mean over all ranks, a view of its group's buffer.

        Raises:
            RuntimeError: a trainable parameter has no gradient, which other ranks would wait for.
        """
        for parameter in (p for group in self._groups for p in group):
            if parameter.grad is None:
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} has no gradient: before training on several ranks, "
                    "freeze parameters that the loss does not depend on"
                )
        for i, group in enumerate(self._groups):
            buffer, views = self._fixed[i] if self._fixed else _views(group, [p.shape for p in group])
            for parameter, view in zip(group, views, strict=True):
                # eager passes make gradients of their own
                gradient = parameter.grad
                if gradient is not None and gradient is not view:
                    view.copy_(gradient)
                    parameter.grad = view
            # DDP divides before the sum as well
            buffer.div_(dist.get_world_size())
            dist.all_reduce(buffer)


class Replica:
    """The module inside of DDP's wrapper, whose gradients are averaged after the last micro-batch of a step.

    During micro-batches its parameters are other objects with the same memory: DDP's hooks hold the autograd nodes of
    its own ones, on the stream on which DDP was made, and a capture on another stream must not wait for that stream.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._setup(wrapper.module, [p.detach() for p in wrapper.module.parameters()])

    def _setup(self, model: nn.Module, whole: list[Tensor]) -> None:
        """Prepare for `model`, whose parameters have the memory `whole` during micro-batches."""
        self._model = model
        # modules and names of each parameter; tied parameters have several
        owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(parameter, []).append((module, name))
        self._own, self._owners = list(owners), list(owners.values())
        self._whole = [nn.Parameter(w, p.requires_grad) for w, p in zip(whole, self._own, strict=True)]
        self._averaged = AveragedGradients(self._whole)
        self._begun = False

    def fixed_gradients(self) -> list[Tensor | None]:
        """Return memory for the gradients of the micro-batches' parameters, in their order; None for frozen ones."""
        return self._averaged.fixed()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[nn.Module]:
        """Context manager: yield the model for the passes of a micro-batch, without the hooks of DDP or FSDP2.

        After the last micro-batch of a step (`last`), the model's own parameters have the averaged gradients.

        Raises:
            RuntimeError: a parameter was frozen or unfrozen since the first step, or has no gradient.
        """
        if not self._begun:
            if [p.requires_grad for p in self._own] != [p.requires_grad for p in self._whole]:
                raise RuntimeError("parameters were frozen or unfrozen after the first step, on several ranks")
            self._begin_step()
            for parameter in self._whole:
                parameter.grad = None
            self._begun = True
        with ExitStack() as stack:
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    stack.enter_context(_unsharded(module))
            self._assign(self._whole)
            stack.callback(self._assign, self._own)
            yield self._model
        if last:
            self._averaged.average()
            self._give_gradients()
            self._begun = False

    def _begin_step(self) -> None:
        """Prepare the whole weights for a step."""

    def _give_gradients(self) -> None:
        for parameter, whole in zip(self._own, self._whole, strict=True):
            parameter.grad = whole.grad

    def _assign(self, parameters: list[nn.Parameter]) -> None:
        for parameter, owners in zip(parameters, self._owners, strict=True):
            for module, name in owners:
                module._parameters[name] = parameter


class GatheredReplica(Replica):
    """A model that FSDP2 shards, with whole weights instead of the shards during micro-batches.

    The optimizer and checkpoints see the shards. During micro-batches modules have their own classes and no hooks of
    FSDP2.

    Raises:
        ValueError: a parameter is not sharded along its first axis alone, or parameters have several dtypes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reshard()
        shards: Any = list(model.parameters())
        if any(not isinstance(p, DTensor) or p.placements != (Shard(0),) for p in shards):
            raise ValueError("every parameter must be sharded along its first axis, over one group of ranks")
        mesh = shards[0].device_mesh
        self._group, self._rank, self._ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        local = [p.to_local() for p in shards]
        self._setup(model, _views(local, [p.shape for p in shards])[1])
        # FSDP2 gives each rank this number of rows, the last ranks fewer or none
        self._rows = [-(-p.shape[0] // self._ranks) for p in shards]
        padded = [(rows, *p.shape[1:]) for rows, p in zip(self._rows, shards, strict=True)]
        self._sent, self._parts = _views(local, padded)

    def _reshard(self) -> None:
        """Make modules hold shards: an evaluation through FSDP2's hooks leaves some gathered."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def _begin_step(self) -> None:
        """Gather whole weights."""
        self._reshard()
        for part, shard in zip(self._parts, cast(list[DTensor], self._own), strict=True):
            local = shard.to_local()
            part[: local.shape[0]].copy_(local)
        found = self._sent.new_empty(self._ranks * self._sent.numel())
        dist.all_gather_into_tensor(found, self._sent, group=self._group)
        found = found.view(self._ranks, -1)
        start = self._sent.data_ptr()
        for part, whole in zip(self._parts, self._whole, strict=True):
            at = (part.data_ptr() - start) // part.element_size()
            rows = found[:, at : at + part.numel()].unflatten(1, part.shape).flatten(0, 1)
            whole.copy_(rows[: whole.shape[0]])

    @torch.no_grad()
    def _give_gradients(self) -> None:
        for shard, whole, rows in zip(cast(list[DTensor], self._own), self._whole, self._rows, strict=True):
            if whole.grad is not None:
                begin = min(self._rank * rows, whole.shape[0])
                part = whole.grad[begin : begin + shard.to_local().shape[0]]
                shard.grad = DTensor.from_local(
                    part, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
                )


def _views(like: list[Any], shapes: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """Return a buffer of zeros, and a view of it for each of these shapes.

    Raises:
        ValueError: the tensors `like`, whose dtype and device the buffer has, have several.
    """
    kinds = {(x.dtype, x.device) for x in like}
    if len(kinds) != 1:
        raise ValueError(f"parameters of one dtype and device can share a buffer, got {len(kinds)} kinds")
    sizes = [torch.Size(shape).numel() for shape in shapes]
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    buffer = like[0].detach().new_zeros(sum(padded))
    parts = zip(buffer.split(padded), sizes, shapes, strict=True)
    return buffer, [part[:size].view(shape) for part, size, shape in parts]


@contextmanager
def _unsharded(module: nn.Module) -> Iterator[None]:
    """Context manager: give a module that FSDP2 shards its own class, and take FSDP2's hooks off."""
    kind, groups = type(module), (module._forward_pre_hooks, module._forward_hooks)
    taken = [{key: hook for key, hook in hooks.items() if _is_fsdp(hook)} for hooks in groups]
    # FSDP2 makes a class with the bases FSDPModule and the module's own class
    module.__class__ = kind.__bases__[-1]
    for hooks, own in zip(groups, taken, strict=True):
        for key in own:
            del hooks[key]
    try:
        yield
    finally:
        module.__class__ = kind
        for hooks, own in zip(groups, taken, strict=True):
            others = dict(hooks)
            hooks.clear()
            hooks.update({**own, **others})


def _is_fsdp(hook: Callable) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
