"""Trace graphs of torch.compile as on a GPU, but execute them only for their shapes: no kernel is interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.compilers import nop
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

Model = TypeVar("Model", bound=nn.Module)


class CountedGraphs:
    """A torch.compile backend that counts graphs; its forward and backward graphs can return zeros of the right shapes.

    Args:
        values: whether graphs compute their values; if False, they return zeros.

    Attributes:
        made: number of graphs that torch.compile has made.
    """

    def __init__(self, *, values: bool = False) -> None:
        self.made = 0
        self._compiler = nop if values else _shapes_of

    def __call__(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Callable:
        self.made += 1
        return aot_autograd(fw_compiler=self._compiler, bw_compiler=self._compiler)(graph, inputs)


def _shapes_of(graph: GraphModule, _: Sequence[Tensor]) -> Callable:
    def run(*args: Any) -> tuple:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            outputs = graph(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args))
        return tuple(torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x for x in outputs)

    return make_boxed_func(run)


def by_kernels(model: Model) -> Model:
    """Set `impl` to "triton", the choice on a GPU, in every module that has it, and return the model."""
    module: Any
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = "triton"
    return model
