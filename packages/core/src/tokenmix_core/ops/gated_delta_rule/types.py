"""What the steps of a pass hand to one another, by the names that kernels and README.md give it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmix_core.ops.buffers import aligned
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK


class Inputs(NamedTuple):
    """The arguments of `chunk_gated_delta_rule`, in the order of the operators' schemas; steps take them `aligned`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    qk_l2norm: bool
    impl: str | None = None
    writes: Tensor | None = None
    write_chunk: int = CHUNK

    @property
    def run(self) -> int:
        """Chunks that share a factor of `writes`; 0 where all is written."""
        return 0 if self.writes is None else self.write_chunk // CHUNK

    def aligned(self) -> Inputs:
        """The same as kernels read it: contiguous, at multiples of 16 bytes; `writes [slots, HV]` in float32."""
        q, k, v, g, beta, initial_state = map(aligned, self[:6])
        writes = None if self.writes is None else self.writes.flatten(0, 1).float().contiguous()
        return self._replace(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, writes=writes)


class Terms(NamedTuple):
    """What forward and backward pass share.

    Attributes:
        inverse: Ã `[B, T, HV, C]`, in k's dtype.
        gates: b, β r, r and β, float32 `[HV, B · T, 4]`; r are the keys' inverse norms.
        entering: the state that enters each segment, float32 `[slots, HV, K, V]`; None where sequences are whole.
        transitions: M of each segment, float32 `[slots, HV, K, K]`; None there, too.
    """

    inverse: Tensor
    gates: Tensor
    entering: Tensor | None
    transitions: Tensor | None


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass.

    Attributes:
        residual: R, like v.
        states: the state entering each chunk, in v's dtype, `[slots, HV, K, V]`.
        remainders: what rounding took from these, like them; None where nobody asks.
    """

    residual: Tensor
    states: Tensor
    remainders: Tensor | None = None


class Reverse(NamedTuple):
    """What the steps of the backward pass take: a call, what its forward pass made, and the gradients that arrive.

    Segments of the reverse pass have `segment` tokens, a multiple of the chunk; where they have their M, `transitions`
    carry gradients through those that do not forget. Portable kernels take whole sequences.
    """

    x: Inputs
    terms: Terms
    saved: Saved
    do: Tensor | None
    dfinal_state: Tensor | None
    segment: int


class Gradients(NamedTuple):
    """Gradients of a call's arguments; None for those of states and writes that it does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    writes: Tensor | None


class OfRuns(NamedTuple):
    """Gradients by run of chunks that share a factor of `writes`, in parts: float32 `[slots, HV, parts]`."""

    # of the factor
    factor: Tensor
    # of each decay in the run, by way of the state before it, without what the run writes
    decay: Tensor


class OfStates(NamedTuple):
    """What the reverse pass over chunks finds.

    Attributes:
        dv: the gradient of v, in its dtype.
        dstates: that of the state leaving each chunk, dS' `[slots, HV, K, V]`, in v's dtype.
        ends: ⟨dS', S⟩ of each chunk, with S entering it, in parts, float32 `[slots, HV, parts]`.
        dinitial_state: that of the initial state; None where there is none.
        of_runs: what the gradients of `writes` and gates take from runs of several chunks; None elsewhere.
    """

    dv: Tensor
    dstates: Tensor
    ends: Tensor
    dinitial_state: Tensor | None
    of_runs: OfRuns | None
