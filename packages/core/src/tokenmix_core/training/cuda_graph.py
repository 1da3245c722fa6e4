"""Forward and backward passes of training, recorded once on a GPU and repeated by a single launch.

A training step launches some thousands of kernels, one by one. Where a GPU is done sooner than a host can ask for the
next one it waits: with small models and small batches most of the time, with large ones in gaps between kernels. A CUDA
graph has neither.

The passes of a kind of micro-batch are made as always the first time, recorded the second, and repeated from then on.
All repeats leave gradients in the same memory: of an update's first micro-batch in place of what was there, of the
others added to it. That memory, and that of a pass's activations, belongs to the recordings until they are dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.nn.plain import settings_of, third_party_modules

# kinds of micro-batches that are recorded, and those that are known to have come once
MOST, SEEN = 8, 64


class Losses(NamedTuple):
    """What a micro-batch's passes return: the loss, and its auxiliary terms by name; all detached scalars."""

    loss: Tensor
    auxiliary: dict[str, Tensor]


# from the model's inputs and the number of scored tokens in the batch to the losses; adds to gradients
Passes = Callable[[dict[str, Any], Any], Losses]


class _Recorded(NamedTuple):
    """One kind of micro-batch: where its inputs go, what repeats its passes, and where its losses then are."""

    inputs: dict[str, Tensor]
    repeat: Callable[[], object]
    losses: Losses


class GraphedStep:
    """Makes forward and backward passes of a model, recorded where they repeat.

    A kind of micro-batch is told by its tensors' shapes, by what its other inputs say, by the plain attributes of all
    modules, such as a window that is drawn for each step, and by which parameters learn. Nothing else may differ
    between two micro-batches, and nothing that passes do in Python is done in a repeat.

    Args:
        model: whose gradients they make.
        device: where it is, with all inputs.
        needed: whether passes that cannot be recorded are an error; else they are made as always from then on, which is
            said. The second pass of a kind then tells whether it ever waits for the device, and only the third is
            recorded; and nothing is where it might not fit into memory.

    Attributes:
        kinds: of micro-batches, what was recorded of each; None where it was made once.

    Raises:
        ValueError: the passes cannot be recorded; the text says why.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, needed: bool = True) -> None:
        capture = cuda_graphs.capture_on(device)
        if capture is None:
            raise ValueError(f"there are no graphs on {device.type}")
        # a tensor's device has a number, "cuda" none
        self.device, self.capture, self.needed = torch.empty(0, device=device).device, capture, needed
        self.model, self.parameters, self.modules = model, list(model.parameters()), list(model.modules())
        self.third_party = third_party_modules(model)
        if self._hooked():
            raise ValueError("the model has hooks, which would not be called")
        self.kinds: dict[Hashable, _Recorded | None] = {}
        # where all repeats leave them, in the order of the parameters
        self.gradients: list[Tensor | None] | None = None
        self._plain = [(vars(m), [name for name, x in vars(m).items() if isinstance(x, _PLAIN)]) for m in self.modules]
        self._settings: Hashable = ()
        self._said, self._failed = False, False
        # kinds whose passes do not wait for the device
        self._quiet: set[Hashable] = set()

    def __call__(self, passes: Passes, inputs: Mapping[str, Any], items: Any) -> Losses:
        """Make the passes of a micro-batch, or repeat them; losses are overwritten by the next call.

        Args:
            passes: what makes them.
            inputs: of the model.
            items: scored tokens of the batch.

        Raises:
            ValueError: a tensor on another device.
            RuntimeError: passes that cannot be recorded; what to do is said.
        """
        now = [p.grad for p in self.parameters]
        first = all(gradient is None for gradient in now)
        if first:
            self._settings = self._look()
        if self._settings is None or not (first or self._are_ours(now)):
            return passes(dict(inputs), items)
        given = {**inputs, _ITEMS: items}
        if apart := [name for name, x in given.items() if isinstance(x, Tensor) and x.device != self.device]:
            raise ValueError(f"GraphedStep: {apart[0]} is on {given[apart[0]].device}, the model on {self.device}")
        kind = (first, _kind(given), self._settings)
        recorded = self.kinds.get(kind)
        if recorded is None and kind in self.kinds and self._room():
            if not self.needed and kind not in self._quiet:
                return self._heard(kind, passes, inputs, items)
            recorded = self.kinds[kind] = self._recorded(passes, given, first, now)
        if recorded is None:
            self._seen(kind)
            return passes(dict(inputs), items)
        for name, place in recorded.inputs.items():
            place.copy_(given[name], non_blocking=True)
        recorded.repeat()
        self._give()
        return recorded.losses

    def _of_learners(self) -> list[Tensor | None]:
        """The repeats' gradients; None for parameters that do not learn now."""
        pairs = zip(self.parameters, self.gradients or (), strict=bool(self.gradients))
        return [gradient if parameter.requires_grad else None for parameter, gradient in pairs]

    def _are_ours(self, now: list[Tensor | None]) -> bool:
        """Tell whether gradients are those that repeats made."""
        return self.gradients is not None and all(a is b for a, b in zip(now, self._of_learners(), strict=True))

    def _give(self) -> None:
        """Let parameters have the repeats' gradients."""
        for parameter, gradient in zip(self.parameters, self._of_learners(), strict=True):
            parameter.grad = gradient

    def _hooked(self) -> bool:
        return any(not getattr(hook, "on_device", False) for module in self.modules for hook in _hooks(module))

    def _look(self) -> Hashable:
        """What passes depend on beside their inputs; None where they have to be made as always, which is said."""
        if self._hooked():
            self._say("the model has got hooks: its passes are made kernel by kernel")
            return None
        if self.modules != list(self.model.modules()):
            self._say("the model has got other modules: its passes are made kernel by kernel")
            return None
        plain = tuple(tuple(_hashable(values.get(name)) for name in names) for values, names in self._plain)
        return plain, settings_of(self.third_party), tuple(p.requires_grad for p in self.parameters)

    def _say(self, what: str) -> None:
        if not self._said:
            warnings.warn(what, stacklevel=5)
        self._said = True

    def _seen(self, kind: Hashable) -> None:
        """Note a kind that was made once; of those that never came again the oldest is forgotten."""
        self.kinds.setdefault(kind, None)
        if len(once := [seen for seen, recorded in self.kinds.items() if recorded is None]) > SEEN:
            del self.kinds[once[0]]

    def _room(self) -> bool:
        if self._failed or sum(recorded is not None for recorded in self.kinds.values()) >= MOST:
            return False
        # what a kind needs beside the passes of others, at most
        if self.needed or cuda_graphs.at_most_half_used(self.device):
            return True
        self._say("passes are made kernel by kernel: repeating them might take more memory than there is")
        return False

    def _recorded(
        self, passes: Passes, given: dict[str, Any], first: bool, now: list[Tensor | None]
    ) -> _Recorded | None:
        """Record passes of a kind that was made before; None where that fails and need not be."""
        try:
            return self._record(passes, given, first)
        except RuntimeError as error:
            if self.needed:
                way = "train with training_graph='never', from the last checkpoint if there is one"
                raise RuntimeError(f"{error}; {way}") from error
            # nothing was done on the device
            for parameter, gradient in zip(self.parameters, now, strict=True):
                parameter.grad = gradient
            self._give_up(str(error))
            return None

    def _heard(self, kind: Hashable, passes: Passes, inputs: Mapping[str, Any], items: Any) -> Losses:
        """Make passes of a kind that was made before, and note whether they wait for the device."""
        with cuda_graphs.noting_waits(self.device) as waits:
            losses = passes(dict(inputs), items)
        if waits:
            self._give_up(waits[0])
        else:
            self._quiet.add(kind)
        return losses

    def _give_up(self, why: str) -> None:
        """Record nothing any more, and repeat nothing, as random numbers may come from elsewhere now."""
        warnings.warn(f"training goes on kernel by kernel: {why}", stacklevel=5)
        self._failed = True
        self.kinds.clear()

    def _record(self, passes: Passes, given: dict[str, Any], first: bool) -> _Recorded:
        places = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
        fixed, found, known = {**given, **places}, [], self.gradients is not None
        if known:
            self._give()

        def work() -> list[Tensor]:
            for gradient in self._of_learners() if first else ():
                if gradient is not None:
                    gradient.zero_()
            losses = passes({name: x for name, x in fixed.items() if name != _ITEMS}, fixed[_ITEMS])
            found.append(losses)
            made = [] if known else [p.grad for p in self.parameters]
            return [losses.loss, *losses.auxiliary.values(), *(x for x in made if x is not None)]

        try:
            repeat = self.capture(work)
        # torch tells a host read, or memory that ran out, in several kinds of errors
        except Exception as error:
            raise RuntimeError(
                f"the passes of this model cannot be recorded ({type(error).__name__}: {error})"
            ) from error
        gradients = [p.grad for p in self.parameters]
        if known and not self._are_ours(gradients):
            raise RuntimeError("a micro-batch gives gradients to parameters that others give none")
        self.gradients = self.gradients or gradients
        return _Recorded(places, repeat, found[0])


# the key of the number of scored tokens beside the model's inputs
_ITEMS = "number of scored tokens"
# attributes that tell kinds apart
_PLAIN = int | float | str | tuple | None


def _hashable(x: Any) -> Hashable:
    return repr(x) if isinstance(x, tuple) else x


def _kind(given: Mapping[str, Any]) -> Hashable:
    """Tensors by what a recording fixes of them, everything else by what it says."""
    return tuple(
        (name, x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (name, repr(x))
        for name, x in sorted(given.items())
    )


def _hooks(module: nn.Module) -> list[Callable]:
    groups = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for group in groups for hook in group.values()]
