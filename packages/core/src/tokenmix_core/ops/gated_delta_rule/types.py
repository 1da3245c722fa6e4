"""Arguments, intermediate tensors and gradients that the steps exchange, named as in the kernels and README.md."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tokenmix_core.ops.buffers import aligned
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.slots import Pool, slot_arguments


class Inputs(NamedTuple):
    """The arguments of `chunk_gated_delta_rule`: differentiable tensors, then other tensors, then options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    writes: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    qk_l2norm: bool
    impl: str | None = None
    write_chunk: int = CHUNK

    @property
    def chunks_per_write(self) -> int:
        """Chunks that share a factor of `writes`; 0 without `writes`."""
        return 0 if self.writes is None else self.write_chunk // CHUNK

    def aligned(self) -> Inputs:
        """Return the arguments as kernels read them: contiguous, 16-byte aligned, `writes [factors, HV]` in float32."""
        q, k, v, g, beta, initial_state = map(aligned, self[:6])
        writes = None if self.writes is None else self.writes.flatten(0, 1).float().contiguous()
        return self._replace(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, writes=writes)


# the first fields of `Inputs` are tensors; this is their number
TENSORS = 8


class StepInputs(NamedTuple):
    """The arguments of `gated_delta_rule_step`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    scale: float
    qk_l2norm: bool
    impl: str | None = None
    slots: Tensor | None = None


class PrefillInputs(NamedTuple):
    """The arguments of `gated_delta_rule_prefill`: the pool and its slots (`Pool`), then those of a chunkwise call."""

    state: Tensor
    slots: Tensor
    fresh: Tensor | None
    inputs: Inputs


class Terms(NamedTuple):
    """Intermediate tensors that both the forward and the backward pass use.

    The dimension `slots` has one entry per segment (`chunking.chunk_slots`).

    Attributes:
        inverse: Ã = (I + L̃)⁻¹ of each chunk, `[B, T, HV, C]`, in k's dtype.
        gates: b, β r, r and β, float32 `[HV, B · T, 4]`. b: log2 of the decays, cumulated from the chunk's start; r:
            inverse norms of the keys, 1 without `qk_l2norm`.
        entering: the state that enters each segment, float32 `[slots, HV, K, V]`; None for whole sequences.
        transitions: the transition matrix M of each segment, float32 `[slots, HV, K, K]`; None for whole sequences.
    """

    inverse: Tensor
    gates: Tensor
    entering: Tensor | None
    transitions: Tensor | None


class Saved(NamedTuple):
    """Tensors of the scan over chunks that the backward pass reads; `slots`: one entry per chunk.

    Attributes:
        residual: R, each value minus its recall from the state (README.md), in the shape and dtype of v.
        states: the state entering each chunk, in v's dtype, `[slots, HV, K, V]`.
        remainders: the rounding errors of `states`, in the same shape and dtype; None if backward kernels need none.
    """

    residual: Tensor
    states: Tensor
    remainders: Tensor | None = None


class Reverse(NamedTuple):
    """Arguments of the backward steps: those of the call, tensors of its forward pass, gradients of its results.

    Gluon kernels split the reverse scan into segments of `segment` tokens, a multiple of the chunk length. Gradients
    pass through a segment by its matrix in `terms.transitions` unless its decay is negligible. Portable kernels ignore
    `segment`, and scan whole sequences.
    """

    x: Inputs
    terms: Terms
    saved: Saved
    do: Tensor | None
    dfinal_state: Tensor | None
    segment: int


class Gradients(NamedTuple):
    """Gradients in the order of `Inputs`; None for an absent initial state or absent `writes`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    writes: Tensor | None


class WriteGradients(NamedTuple):
    """Gradients for write factors that several chunks share; float32 `[factors, HV, parts]`, a part per tile of V."""

    # gradient of the shared factor
    factor: Tensor
    # gradient through the state without the writes of the chunks that share the factor; it is added, as the same value,
    # to the gradients of the log-decays of all these chunks
    decay: Tensor


class StateGradients(NamedTuple):
    """Results of the reverse scan over chunks; `slots`: one entry per chunk.

    Attributes:
        dv: the gradient of v, in its dtype.
        dstates: dS', the gradient of the state leaving each chunk, `[slots, HV, K, V]`, in v's dtype.
        ends: ⟨dS', S⟩ of each chunk, S being its entering state, as partial sums, float32 `[slots, HV, parts]`.
        dinitial_state: the gradient of the initial state; None without one.
        of_writes: gradients of `writes` and gates if several chunks share a factor; else None.
    """

    dv: Tensor
    dstates: Tensor
    ends: Tensor
    dinitial_state: Tensor | None
    of_writes: WriteGradients | None


def state_arguments(x: Inputs, final_state: Tensor | None, pool: Pool | None) -> dict[str, Any]:
    """Return the forward kernels' arguments for initial and final states: the given tensors, or the pool for both."""
    initial_state = x.initial_state
    if pool is not None:
        initial_state = final_state = pool.state
    parts = parts_of(x.v, pool)
    return {"initial_state": initial_state, "final_state": final_state, **slot_arguments(pool), "PARTS": parts}


def parts_of(v: Tensor, pool: Pool | None) -> int:
    """Return how many heads of v share a head of the pool's states (`head_split`); 1 without a pool."""
    return 1 if pool is None else pool.state.shape[3] // v.shape[3]
