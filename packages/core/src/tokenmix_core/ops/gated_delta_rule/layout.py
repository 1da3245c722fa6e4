"""What the steps take and hand on, the chunk length, the shapes of what is kept, and the precision of products."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops.common import Layout, aligned, interpreting

CHUNK = 64

# sizes that Triton would otherwise compile anew for: those equal to 1, and those divisible by 16
SIZES = ("T", "N", "H", "group", "tokens")


class Call(NamedTuple):
    """The arguments of a call, in the order of the operators' schemas: those of `chunk_gated_delta_rule`.

    Steps take it as `read` leaves it, named x.
    """

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


def read(call: Call) -> Call:
    """The same as kernels read it: tensors contiguous, at multiples of 16 bytes; `writes [slots, HV]` in float32."""
    q, k, v, g, beta, initial_state = map(aligned, call[:6])
    writes = None if call.writes is None else call.writes.flatten(0, 1).float().contiguous()
    return call._replace(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, writes=writes)


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

    x: Call
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


def term_layouts(k: Tensor, HV: int) -> tuple[Layout, ...]:
    """Ã and the gates of `prepare`."""
    B, T = k.shape[:2]
    return ((B, T, HV, CHUNK), k.dtype), ((HV, B * T, 4), torch.float32)


def state_layouts(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Layout, ...]:
    """R and the state entering each chunk, of `forward`."""
    B, T, HV, V = v.shape
    return (tuple(v.shape), v.dtype), ((chunk_slots(B, T, CHUNK, cu_seqlens), HV, k.shape[-1], V), v.dtype)


def dot_precision(x: Tensor) -> str:
    """float32 inputs are multiplied to nearly float32's precision; other products ignore the argument."""
    return "tf32x3" if x.element_size() == 4 else "tf32"


def solve_precision(x: Tensor) -> str:
    """The inverse amplifies rounding where keys repeat, so its products are finer than the inputs."""
    # three products of two bfloat16 parts keep 16 bits, enough for bfloat16 alone; the interpreter needs no parts
    return "bf16x3" if x.dtype == torch.bfloat16 and not interpreting() else "tf32x3"
