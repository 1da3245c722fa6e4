"""Heads of many columns as several of fewer: columns of the state know nothing of one another, and share all else.

`plan.narrow_heads` says where kernels are given a call so.
"""

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import narrowed_heads
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Inputs

# gates a program
_GATES = 1024


@cached_launch
@triton.jit(do_not_specialize=["numbers"])
def repeat_gates_kernel(g, beta, g_parts, beta_parts, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of `g_parts` and of `beta_parts` a program."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(g_parts + o, tl.load(g + o // PARTS, mask=o < numbers), mask=o < numbers)
    tl.store(beta_parts + o, tl.load(beta + o // PARTS, mask=o < numbers), mask=o < numbers)


@triton.jit
def sum_parts(x, y, o, numbers, PARTS: tl.constexpr):
    """Numbers of y from `PARTS` of x each."""
    b_y = tl.load(x + o * PARTS, mask=o < numbers, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        b_y += tl.load(x + o * PARTS + i, mask=o < numbers, other=0.0).to(tl.float32)
    tl.store(y + o, b_y.to(y.dtype.element_ty), mask=o < numbers)


@cached_launch
@triton.jit(do_not_specialize=["numbers"])
def sum_gates_kernel(dg_parts, dbeta_parts, dg, dbeta, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK numbers of dg and of dβ a program."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum_parts(dg_parts, dg, o, numbers, PARTS)
    sum_parts(dbeta_parts, dbeta, o, numbers, PARTS)


def _repeat_gates(g: Tensor, beta: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Gates `[B, T, HV]` for each of the `parts` that a value head is shared out in, `[B, T, HV · parts]`."""
    g_parts, beta_parts = (x.new_empty(*x.shape[:2], x.shape[2] * parts) for x in (g, beta))
    repeat_gates_kernel[(cdiv(g_parts.numel(), _GATES),)](
        g=g, beta=beta, g_parts=g_parts, beta_parts=beta_parts, numbers=g_parts.numel(), PARTS=parts, BLOCK=_GATES,
        num_warps=4,
    )  # fmt: skip
    return g_parts, beta_parts


def _sum_gates(dg_parts: Tensor, dbeta_parts: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """The gradients of gates that `_repeat_gates` has repeated."""
    dg, dbeta = (x.new_empty(*x.shape[:2], x.shape[2] // parts) for x in (dg_parts, dbeta_parts))
    sum_gates_kernel[(cdiv(dg.numel(), _GATES),)](
        dg_parts=dg_parts, dbeta_parts=dbeta_parts, dg=dg, dbeta=dbeta, numbers=dg.numel(), PARTS=parts, BLOCK=_GATES,
        num_warps=4,
    )  # fmt: skip
    return dg, dbeta


def narrowed(x: Inputs, parts: int) -> Inputs:
    """A call with each head of V as `parts` of V / parts columns."""
    g, beta = _repeat_gates(x.g, x.beta, parts)
    return x._replace(
        v=narrowed_heads(x.v, parts),
        g=g,
        beta=beta,
        initial_state=None if x.initial_state is None else narrowed_states(x.initial_state, parts),
        writes=None if x.writes is None else x.writes.unsqueeze(-1).expand(-1, -1, parts).contiguous().flatten(-2),
    )


def narrowed_states(states: Tensor, parts: int) -> Tensor:
    """States `[N, HV, K, V]` as `[N, HV · parts, K, V / parts]`."""
    return states.unflatten(-1, (parts, -1)).transpose(2, 3).contiguous().flatten(1, 2)


def joined(o: Tensor, final_state: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Outputs and final states of whole heads."""
    return _joined_heads(o, parts), _joined_states(final_state, parts)


def joined_gradients(grads: Gradients, parts: int) -> Gradients:
    """Gradients of the call that was `narrowed`."""
    dg, dbeta = _sum_gates(grads.g, grads.beta, parts)
    return grads._replace(
        v=_joined_heads(grads.v, parts),
        g=dg,
        beta=dbeta,
        initial_state=None if grads.initial_state is None else _joined_states(grads.initial_state, parts),
        writes=None if grads.writes is None else grads.writes.unflatten(-1, (-1, parts)).sum(-1),
    )


def _joined_heads(x: Tensor, parts: int) -> Tensor:
    return x.unflatten(2, (-1, parts)).flatten(3)


def _joined_states(states: Tensor, parts: int) -> Tensor:
    return states.unflatten(1, (-1, parts)).transpose(2, 3).contiguous().flatten(3)
