"""The order in which exchanges between ranks and computations begin, for tests that they overlap."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from support.split_contract import gpu_errors
from tokenmix_core import ops, parallel
from tokenmix_core.parallel import SequenceShard, overlap


class _Logged(torch.autograd.Function):
    """The identity on an operation's output; its backward logs "gradient", just before that of the operation runs."""

    @staticmethod
    def forward(ctx, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.log.append("gradient")
        return grad, None


def order_of_exchanges(group: dist.ProcessGroup, name: str) -> tuple[list[str], list[str]]:
    """Return the events of a forward and of a backward pass with two groups of heads, on rank 0 of two.

    An exchange gives a "begin" and a "wait", and a call of the operation "compute" and, in the backward pass,
    "gradient".
    """
    log: list[str] = []
    operation, sizes = {
        "attention": ("attention", [(4, 8), (2, 8), (2, 8)]),
        "gated delta rule": ("chunk_gated_delta_rule", [(2, 8)] * 3 + [(2,)] * 2),
        "ssd": ("chunk_ssd", [(2, 8)] * 3 + [(2,)]),
    }[name]
    computed, shard = getattr(ops, operation), SequenceShard(64, group=group)

    def begun(start: Callable) -> Callable:
        def exchange(*args: Any, **options: Any) -> Any:
            log.append("begin")
            work = start(*args, **options)
            return SimpleNamespace(wait=lambda: (log.append("wait"), work.wait()))

        return exchange

    def compute(*args: Any, **options: Any) -> Any:
        log.append("compute")
        out = computed(*args, **options)
        return type(out)(_Logged.apply(out[0], log) if out[0].requires_grad else out[0], *out[1:])

    x = [(-torch.rand(1, 32, *size)).requires_grad_() for size in sizes]
    with (
        mock.patch.object(overlap, "GROUP_BYTES", 1),
        mock.patch.object(ops, operation, compute),
        mock.patch.object(dist, "all_to_all_single", begun(dist.all_to_all_single)),
        mock.patch.object(dist, "all_gather_into_tensor", begun(dist.all_gather_into_tensor)),
    ):
        o = getattr(parallel, operation)(*x, sequence_shard=shard)[0]
        forward, log[:] = list(log), []
        o.sum().backward()
    return forward, log


def gpu_errors_by_head_groups(group: dist.ProcessGroup, *args: Any) -> dict[str, tuple[float, float]]:
    """Return `gpu_errors` of calls that exchange one group of heads while another one is computed."""
    with mock.patch.object(overlap, "GROUP_BYTES", 1):
        return gpu_errors(group, *args)
