"""Split heads of 256 value columns into two of 128 that share q, k and gates: the state's columns are independent."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.gated_delta_rule.constants import split_values
from tokenmix_core.ops.gated_delta_rule.plan import head_parts
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Inputs

# number of gates (elements of g and β) that a program copies or sums
_GATES = 1024


@cached_launch
@triton.jit(do_not_specialize=["elements"])
def repeat_gates_kernel(g, beta, g_parts, beta_parts, elements, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Repeat each gate PARTS times: a program writes BLOCK elements of `g_parts` and of `beta_parts`."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(g_parts + o, tl.load(g + o // PARTS, mask=o < elements), mask=o < elements)
    tl.store(beta_parts + o, tl.load(beta + o // PARTS, mask=o < elements), mask=o < elements)


@triton.jit
def sum_parts(x, y, o, elements, PARTS: tl.constexpr):
    """Write the sum of each PARTS consecutive elements of x to y."""
    b_y = tl.load(x + o * PARTS, mask=o < elements, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        b_y += tl.load(x + o * PARTS + i, mask=o < elements, other=0.0).to(tl.float32)
    tl.store(y + o, b_y.to(y.dtype.element_ty), mask=o < elements)


@cached_launch
@triton.jit(do_not_specialize=["elements"])
def sum_gates_kernel(dg_parts, dbeta_parts, dg, dbeta, elements, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the gradients of the repeated gates: a program writes BLOCK elements of dg and of dβ."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum_parts(dg_parts, dg, o, elements, PARTS)
    sum_parts(dbeta_parts, dbeta, o, elements, PARTS)


def split_heads(x: Inputs) -> tuple[Inputs, int]:
    """Return the call's arguments with each value head split into heads of V / parts columns, and `parts`."""
    parts = head_parts(x.k, x.v, x.impl, x.chunks_per_write)
    if parts == 1:
        return x, parts
    g, beta = (t.new_empty(*t.shape[:2], t.shape[2] * parts) for t in (x.g, x.beta))
    repeat_gates_kernel[(cdiv(g.numel(), _GATES),)](
        g=x.g, beta=x.beta, g_parts=g, beta_parts=beta, elements=g.numel(), PARTS=parts, BLOCK=_GATES, num_warps=4
    )
    x = x._replace(
        v=split_values(x.v, parts),
        g=g,
        beta=beta,
        initial_state=None if x.initial_state is None else split_states(x.initial_state, parts),
        writes=None if x.writes is None else x.writes.unsqueeze(-1).expand(-1, -1, parts).contiguous().flatten(-2),
    )
    return x, parts


def split_output_gradients(
    do: Tensor | None, dfinal_state: Tensor | None, parts: int
) -> tuple[Tensor | None, Tensor | None]:
    """Split the gradients of outputs and final states as `split_heads` splits v."""
    if parts == 1:
        return do, dfinal_state
    return (
        None if do is None else split_values(do, parts),
        None if dfinal_state is None else split_states(dfinal_state, parts),
    )


def join_outputs(o: Tensor, final_state: Any, parts: int) -> tuple[Tensor, Any]:
    """Undo the split: return outputs of the original heads, and final states unless they are None."""
    if parts == 1:
        return o, final_state
    return _join_values(o, parts), None if final_state is None else join_states(final_state, parts)


def join_gradients(grads: Gradients, parts: int) -> Gradients:
    """Undo the split: return the gradients of the arguments that were given to `split_heads`."""
    if parts == 1:
        return grads
    dg, dbeta = (t.new_empty(*t.shape[:2], t.shape[2] // parts) for t in (grads.g, grads.beta))
    sum_gates_kernel[(cdiv(dg.numel(), _GATES),)](
        dg_parts=grads.g, dbeta_parts=grads.beta, dg=dg, dbeta=dbeta, elements=dg.numel(), PARTS=parts, BLOCK=_GATES,
        num_warps=4,
    )  # fmt: skip
    return grads._replace(
        v=_join_values(grads.v, parts),
        g=dg,
        beta=dbeta,
        initial_state=None if grads.initial_state is None else join_states(grads.initial_state, parts),
        writes=None if grads.writes is None else grads.writes.unflatten(-1, (-1, parts)).sum(-1),
    )


def _join_values(x: Tensor, parts: int) -> Tensor:
    return x.reshape(*x.shape[:2], x.shape[2] // parts, x.shape[3] * parts)


def split_states(states: Tensor, parts: int) -> Tensor:
    """Return states `[N, HV, K, V]` as `[N, HV · parts, K, V / parts]`."""
    N, HV, K, V = states.shape
    return states.reshape(N, HV, K, parts, V // parts).transpose(2, 3).contiguous().view(N, HV * parts, K, V // parts)


def join_states(states: Tensor, parts: int) -> Tensor:
    """Undo `split_states`."""
    N, heads, K, V = states.shape
    return (
        states.reshape(N, heads // parts, parts, K, V)
        .transpose(2, 3)
        .contiguous()
        .view(N, heads // parts, K, V * parts)
    )
