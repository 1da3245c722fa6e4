"""CUDA graphs of the forward and backward passes of training: captured once, then replayed by a single launch.

A training step launches thousands of kernels one by one. The GPU is idle whenever it finishes a kernel before the CPU
has launched the next one: most of the time for small models and batches, sometimes for large ones. In a CUDA graph
there are no such gaps.

Micro-batches with the same signature share a graph: the first micro-batch runs eagerly (with "auto" also the second),
the next one is captured, later ones are replayed. All replays write gradients to the same memory: the first micro-batch
of an optimizer step overwrites it, the others add to it. The graphs own this memory and that of the activations until
they are dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.nn.plain import modules_of, settings_of, third_party_modules

# whether to capture passes as CUDA graphs: "auto" if that saves time, "always" (a failure is an error), or "never"
TrainingGraph = Literal["auto", "always", "never"]
# maximum number of graphs, and of remembered signatures that have no graph
MOST, SEEN = 8, 64


class Losses(NamedTuple):
    """The loss and the auxiliary losses (by name) of a micro-batch, as detached scalars."""

    loss: Tensor
    auxiliary: dict[str, Tensor]


# forward and backward pass: a function of the model's inputs and the batch's number of scored tokens; it accumulates
# gradients
Passes = Callable[[dict[str, Any], Any], Losses]


class _Graph(NamedTuple):
    """The graph of a signature: the tensors that it reads, a function that replays it, and the losses it writes."""

    inputs: dict[str, Tensor]
    replay: Callable[[], object]
    losses: Losses


class GraphedStep:
    """Runs a model's forward and backward passes; if a signature recurs, captures and replays them as a CUDA graph.

    A signature consists of the shapes of the tensors, the values of all other inputs, the plain attributes of all
    modules (such as a window that is drawn for each step), the set of trainable parameters, and whether the micro-batch
    is the first of its optimizer step. Two micro-batches of one signature must not differ in anything else, because a
    replay runs no Python code of the passes.

    Args:
        model: the model whose gradients are computed.
        device: device of the model and of all inputs.
        training_graph: "always" raises an error if passes cannot be captured; "auto" warns then and runs all passes
            eagerly from that time on. With "auto" the second micro-batch of a signature also runs eagerly, to find out
            whether the passes wait for the device; the third is captured, unless the graph might exceed the memory.
        gradients: the tensors to which replays write gradients, in the order of the parameters (None for frozen ones);
            if not given, those that the first capture makes.

    Attributes:
        graphs: for each signature its graph, or None if it is not captured yet.

    Raises:
        ValueError: the passes cannot be captured; the message gives the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        training_graph: TrainingGraph = "always",
        gradients: list[Tensor | None] | None = None,
    ) -> None:
        capture = cuda_graphs.capture_on(device)
        if capture is None:
            raise ValueError(f"there are no graphs on {device.type}")
        # the device of a tensor has an index, which the device "cuda" lacks
        self.device, self.capture = torch.empty(0, device=device).device, capture
        self.training_graph = training_graph
        self.model, self.parameters, self.modules = model, list(model.parameters()), list(model.modules())
        self.third_party = third_party_modules(model)
        if self._hooked():
            raise ValueError("the model has hooks, which would not be called")
        self.graphs: dict[Hashable, _Graph | None] = {}
        # gradients to which all replays write, in the order of `parameters`
        self.gradients = gradients
        self._plain = [(vars(m), [name for name, x in vars(m).items() if isinstance(x, _PLAIN)]) for m in self.modules]
        self._settings: Hashable = ()
        self._warned, self._failed = False, False
        # signatures of passes that were found not to wait for the device
        self._without_waits: set[Hashable] = set()

    def __call__(self, passes: Passes, inputs: Mapping[str, Any], items: Any) -> Losses:
        """Run or replay the passes of one micro-batch. The returned losses are overwritten by the next call.

        Args:
            passes: the forward and backward passes.
            inputs: inputs of the model.
            items: the number of scored tokens in the batch.

        Raises:
            ValueError: a tensor is on another device than the model.
            RuntimeError: the passes cannot be captured; the message says which option avoids this.
        """
        gradients = [p.grad for p in self.parameters]
        first = all(gradient is None for gradient in gradients)
        if first:
            self._settings = self._look()
        if self._settings is None or not (first or self._are_ours(gradients)):
            return passes(dict(inputs), items)
        given = {**inputs, _ITEMS: items}
        if apart := [name for name, x in given.items() if isinstance(x, Tensor) and x.device != self.device]:
            raise ValueError(f"GraphedStep: {apart[0]} is on {given[apart[0]].device}, the model on {self.device}")
        signature = (first, _signature(given), self._settings)
        graph = self.graphs.get(signature)
        if graph is None and signature in self.graphs and self._has_capacity():
            if self.training_graph == "auto" and signature not in self._without_waits:
                return self._run_noting_waits(signature, passes, inputs, items)
            graph = self.graphs[signature] = self._captured(passes, given, first, gradients)
        if graph is None:
            self._note(signature)
            return passes(dict(inputs), items)
        for name, x in graph.inputs.items():
            x.copy_(given[name], non_blocking=True)
        graph.replay()
        self._assign_gradients()
        return graph.losses

    def _trainable_gradients(self) -> list[Tensor | None]:
        """Return the gradients to which replays write, in parameter order; None for parameters that are frozen now."""
        pairs = zip(self.parameters, self.gradients or (), strict=bool(self.gradients))
        return [gradient if parameter.requires_grad else None for parameter, gradient in pairs]

    def _are_ours(self, gradients: list[Tensor | None]) -> bool:
        """Return True if `gradients` are the same tensor objects as those to which replays write."""
        return self.gradients is not None and all(
            a is b for a, b in zip(gradients, self._trainable_gradients(), strict=True)
        )

    def _assign_gradients(self) -> None:
        """Set each parameter's `.grad` to the tensor to which replays write."""
        for parameter, gradient in zip(self.parameters, self._trainable_gradients(), strict=True):
            parameter.grad = gradient

    def _hooked(self) -> bool:
        return any(not getattr(hook, "on_device", False) for module in self.modules for hook in _hooks(module))

    def _look(self) -> Hashable:
        """Return the settings of the modules on which passes depend.

        If the settings forbid a capture, warn and return None.
        """
        if self._hooked():
            self._warn("the model has hooks now: its passes run kernel by kernel")
            return None
        if self.modules != modules_of(self.model):
            self._warn("the model has other modules now: its passes run kernel by kernel")
            return None
        plain = tuple(tuple(_hashable(values.get(name)) for name in names) for values, names in self._plain)
        return plain, settings_of(self.third_party), tuple(p.requires_grad for p in self.parameters)

    def _warn(self, message: str) -> None:
        if not self._warned:
            warnings.warn(message, stacklevel=5)
        self._warned = True

    def _note(self, signature: Hashable) -> None:
        """Remember a signature; if there are more than `SEEN` without a graph, drop the oldest."""
        self.graphs.setdefault(signature, None)
        if len(once := [each for each, graph in self.graphs.items() if graph is None]) > SEEN:
            del self.graphs[once[0]]

    def _has_capacity(self) -> bool:
        if self._failed or sum(graph is not None for graph in self.graphs.values()) >= MOST:
            return False
        # a graph takes as much memory as the eager passes: it fits if these used at most half
        if self.training_graph == "always" or cuda_graphs.at_most_half_used(self.device):
            return True
        self._warn("passes run kernel by kernel: a CUDA graph of them might need more memory than there is")
        return False

    def _captured(
        self, passes: Passes, given: dict[str, Any], first: bool, gradients: list[Tensor | None]
    ) -> _Graph | None:
        """Capture passes whose signature has occurred before; on failure return None ("auto") or raise ("always")."""
        try:
            return self._capture(passes, given, first)
        except RuntimeError as error:
            if self.training_graph == "always":
                way = "train with training_graph='never', from the last checkpoint if there is one"
                raise RuntimeError(f"{error}; {way}") from error
            # a failed capture ran nothing on the device, so only `.grad` must be restored
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self._give_up(str(error))
            return None

    def _run_noting_waits(self, signature: Hashable, passes: Passes, inputs: Mapping[str, Any], items: Any) -> Losses:
        """Run passes eagerly, and find out whether they wait for the device: passes that wait cannot be captured."""
        with cuda_graphs.noting_waits(self.device) as waits:
            losses = passes(dict(inputs), items)
        if waits:
            self._give_up(waits[0])
        else:
            self._without_waits.add(signature)
        return losses

    def _give_up(self, why: str) -> None:
        """Warn, drop all graphs and run eagerly from now on.

        Drop also intact graphs: a failed capture may replace the state of the random generator that they use.
        """
        warnings.warn(f"training continues kernel by kernel: {why}", stacklevel=5)
        self._failed = True
        self.graphs.clear()

    def _capture(self, passes: Passes, given: dict[str, Any], first: bool) -> _Graph:
        static = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
        fixed, found, known = {**given, **static}, [], self.gradients is not None
        if known:
            self._assign_gradients()

        def work() -> list[Tensor]:
            for gradient in self._trainable_gradients() if first else ():
                if gradient is not None:
                    gradient.zero_()
            losses = passes({name: x for name, x in fixed.items() if name != _ITEMS}, fixed[_ITEMS])
            found.append(losses)
            made = [] if known else [p.grad for p in self.parameters]
            return [losses.loss, *losses.auxiliary.values(), *(x for x in made if x is not None)]

        try:
            replay = self.capture(work)
        # torch raises errors of several types if the CPU reads a tensor during capture or memory is exhausted
        except Exception as error:
            raise RuntimeError(
                f"the passes of this model cannot be captured ({type(error).__name__}: {error})"
            ) from error
        gradients = [p.grad for p in self.parameters]
        if known and not self._are_ours(gradients):
            raise RuntimeError("a micro-batch gives gradients to parameters that others give none")
        self.gradients = self.gradients or gradients
        return _Graph(static, replay, found[0])


# the name under which `given` and `fixed` hold the number of scored tokens besides the model's inputs
_ITEMS = "number of scored tokens"
# types of those module attributes that are part of a signature
_PLAIN = int | float | str | tuple | None


def _hashable(x: Any) -> Hashable:
    return repr(x) if isinstance(x, tuple) else x


def _signature(given: Mapping[str, Any]) -> Hashable:
    """Return a hashable signature: shape, dtype and device of tensors, and the repr of all other values."""
    return tuple(
        (name, x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (name, repr(x))
        for name, x in sorted(given.items())
    )


def _hooks(module: nn.Module) -> list[Callable]:
    groups = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return [hook for group in groups for hook in group.values()]
