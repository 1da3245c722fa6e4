"""Forward and backward passes of training, recorded once on a GPU and repeated by a single launch.

A training step launches some thousands of kernels, one by one. Where a GPU is done sooner than a host can ask for the
next one it waits: with small models and small batches most of the time, with large ones in gaps between kernels. A CUDA
graph has neither.

The passes of a kind of micro-batch are made as always the first time, recorded the second, and repeated from then on. A
repeat leaves gradients where the recorded pass made them, or, of an update's later micro-batches, adds to these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix_core.launch import graphs
from tokenmix_core.nn.mixer import Mixer

# kinds of micro-batches that are recorded, each of which keeps its gradients in memory; and kinds that are known to
# have come once
MOST, SEEN = 4, 64


class Losses(NamedTuple):
    """What a micro-batch's passes return: the loss, and its auxiliary terms by name; all detached scalars."""

    loss: Tensor
    auxiliary: dict[str, Tensor]


# from the model's inputs and the number of scored tokens in the batch to the losses; adds to gradients
Passes = Callable[[dict[str, Any], Any], Losses]


class _Recorded(NamedTuple):
    """One kind of micro-batch: where its inputs go, what repeats its passes, and where their results then are.

    `gradients` are those that its passes make, in the order of the parameters; None where they add to others.
    """

    inputs: dict[str, Tensor]
    repeat: Callable[[], object]
    losses: Losses
    gradients: list[Tensor | None] | None


class RecordedPasses:
    """Makes forward and backward passes of a model, recorded where they repeat.

    Args:
        model: whose gradients they make.
        device: where it is.

    Attributes:
        kinds: of micro-batches, what was recorded of each; None where it was made once.

    Raises:
        ValueError: the passes cannot be recorded; the text says why.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        capture = graphs.capture_on(device)
        if capture is None:
            raise ValueError(f"there are no graphs on {device.type}")
        if any(not getattr(hook, "on_device", False) for m in model.modules() for hook in _hooks(m)):
            raise ValueError("the model has hooks, which would not be called")
        self.capture: graphs.Capture | None = capture
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.mixers = [module for module in model.modules() if isinstance(module, Mixer)]
        self.kinds: dict[Hashable, _Recorded | None] = {}

    def __call__(self, passes: Passes, inputs: Mapping[str, Any], items: Any) -> Losses:
        """Make the passes of a micro-batch, or repeat them; losses are overwritten by the next call.

        Args:
            passes: what makes them; nothing that it does in Python beside is done in a repeat.
            inputs: of the model.
            items: scored tokens of the batch.
        """
        there = self._owner()
        if self.capture is None or there == _OTHERS:
            return passes(dict(inputs), items)
        given = {**inputs, _ITEMS: items}
        kind = (there, _kind(given), tuple(_settings(mixer) for mixer in self.mixers))
        recorded = self.kinds.get(kind)
        if recorded is None and kind in self.kinds and self._room():
            recorded = self._record(kind, passes, given, first=there is None)
        if recorded is None:
            self._seen(kind)
            return passes(dict(inputs), items)
        for name, place in recorded.inputs.items():
            place.copy_(given[name], non_blocking=True)
        recorded.repeat()
        if recorded.gradients is not None:
            for parameter, gradient in zip(self.parameters, recorded.gradients, strict=True):
                parameter.grad = gradient
        return recorded.losses

    def _owner(self) -> Hashable:
        """The kind whose repeats made the gradients that are there; None where there are none."""
        now = [p.grad for p in self.parameters]
        if all(gradient is None for gradient in now):
            return None
        for kind, recorded in self.kinds.items():
            made = None if recorded is None else recorded.gradients
            if made is not None and all(mine is theirs for mine, theirs in zip(now, made, strict=True)):
                return kind
        return _OTHERS

    def _seen(self, kind: Hashable) -> None:
        """Note a kind that was made once; of those that never came again the oldest is forgotten."""
        self.kinds.setdefault(kind, None)
        if len(once := [seen for seen, recorded in self.kinds.items() if recorded is None]) > SEEN:
            del self.kinds[once[0]]

    def _room(self) -> bool:
        return sum(recorded is not None for recorded in self.kinds.values()) < MOST

    def _record(self, kind: Hashable, passes: Passes, given: dict[str, Any], *, first: bool) -> _Recorded | None:
        """Record passes of a kind that was made before; None where that fails, which is said."""
        assert self.capture is not None
        places = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
        fixed, found = {**given, **places}, []

        def work() -> list[Tensor]:
            losses = passes({name: x for name, x in fixed.items() if name != _ITEMS}, fixed[_ITEMS])
            found.append(losses)
            made = [p.grad for p in self.parameters] if first else []
            return [losses.loss, *losses.auxiliary.values(), *(x for x in made if x is not None)]

        try:
            repeat = self.capture(work)
        except (RuntimeError, ValueError) as error:
            if first:
                for parameter in self.parameters:
                    parameter.grad = None
            self.kinds, self.capture = {}, None
            why = "memory ran out" if isinstance(error, torch.OutOfMemoryError) else str(error)
            warnings.warn(
                f"the passes of this model cannot be recorded ({why}): training goes on kernel by kernel", stacklevel=4
            )
            return None
        gradients = [p.grad for p in self.parameters] if first else None
        recorded = self.kinds[kind] = _Recorded(places, repeat, found[0], gradients)
        return recorded


# the key of the number of scored tokens beside the model's inputs, and the owner of gradients that no repeat made
_ITEMS = "number of scored tokens"
_OTHERS = "others"


def _kind(given: Mapping[str, Any]) -> Hashable:
    """Tensors by what a recording fixes of them, everything else by what it says."""
    return tuple(
        (name, x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (name, repr(x))
        for name, x in sorted(given.items())
    )


def _settings(module: nn.Module) -> Hashable:
    """The plain attributes of a module, such as a window that is drawn for each step."""
    plain = ((name, x) for name, x in vars(module).items() if isinstance(x, int | float | str | tuple | None))
    return tuple((name, repr(x) if isinstance(x, tuple) else x) for name, x in plain)


def _hooks(module: nn.Module) -> list[Callable]:
    groups = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for group in groups for hook in group.values()]
