"""Choose the kernel of each step, and the segments that sequences are cut into; this happens once per pass.

The choice depends on shapes, dtype, device and alignment, never on the values in tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots, num_sequences
from tokenmix_core.kernels.tuning import one_wave
from tokenmix_core.ops.buffers import buffer_bytes
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, state_layouts

_HOPPER = "tokenmix_core.ops.gated_delta_rule.hopper"
GLUON = GluonForm("gated_delta_rule", _HOPPER, slower="about 2 to 3 times slower")
GLUON_STEP = GluonForm(
    "gated_delta_rule_step",
    f"{_HOPPER}.step",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    slower="a little slower where batches are large",
)

# Minimum fraction of SMs that the waves of the fused backward must fill on average; below it the two-kernel backward
# (reverse state scan, then all chunks in parallel) is faster.
_BUSY = 96 / 132

# kernels of a step: portable Triton, Gluon for heads of 64 or 128, or Gluon in tiles, also for 256 and unequal heads
Form = Literal["triton", "gluon", "gluon tiled"]


class GDNPlan(NamedTuple):
    """The kernel of each step, and the length of the segments that sequences are cut into.

    Attributes:
        segment: tokens of the segments that the forward pass scans in parallel, a multiple of 64; 0 for whole
            sequences.
        backward_segment: tokens of the segments of the reverse scan; 0 for whole sequences. Portable kernels ignore it,
            and scan whole sequences.
        prepare: computes Ã and the gates.
        outputs: computes o from Ã and the gates.
        saves_states: whether the forward pass saves the residuals R and the chunk states for the backward pass.
        states: computes R and the chunk states again in the backward pass, if they are not saved.
        remainders: whether the step `states` also saves the rounding errors of 16-bit states.
        fused_backward: whether one Gluon kernel computes all gradients, instead of the next two steps.
        backward_state: the reverse scan, which computes dV and the gradients of the states.
        backward_chunk: computes dq, dk, dg and dβ, in parallel over chunks.
    """

    segment: int
    backward_segment: int
    prepare: Form
    outputs: Form
    saves_states: bool
    states: Form
    remainders: bool
    fused_backward: bool
    backward_state: Form
    backward_chunk: Form


def plan(
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    impl: str | None,
    *,
    others: Sequence[Tensor | None] = (),
    has_do: bool = True,
    chunks_per_write: int = 0,
) -> GDNPlan:
    """Return the plan of a call with these keys and values.

    Args:
        k, v: `[B, T, H, K]`, `[B, T, HV, V]`.
        cu_seqlens, qk_l2norm, impl: arguments of the call.
        others: further tensors that kernels read row by row: queries, gradients of the outputs.
        has_do: whether the outputs have a gradient; if not, only the final states have one.
        chunks_per_write: how many chunks share a factor of `writes`; 0 without `writes`.

    Raises:
        ValueError: `impl` is "gluon", and Gluon kernels do not run here.
    """
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in (k, v, *others))
    limit = None if aligned else "takes tensors that begin at multiples of 16 bytes"
    if chunks_per_write > 1 and impl == "gluon":
        limit = "takes `writes` for chunks of 64 tokens alone"
    gluon = GLUON.runs(impl, k.device, k.dtype, limit)
    (B, T, _, K), (HV, V) = k.shape, v.shape[2:]
    half, packed = k.element_size() == 2, cu_seqlens is not None
    programs = programs_per_head(k, v, "triton" if chunks_per_write > 1 else impl)
    shape = num_sequences(k, cu_seqlens), HV, B * T
    # segments need normalised keys: the reverse scan omits chunks by their decay, which only then bounds their effect
    backward_segment = tuning.backward_segment_tokens(*shape, packed, programs) if qk_l2norm else 0
    fused_programs = chunk_slots(B, T, backward_segment or cdiv(T, CHUNK) * CHUNK, cu_seqlens) * HV
    portable = GDNPlan(
        segment=forward_segment(k, v, cu_seqlens, impl, chunks_per_write), backward_segment=backward_segment,
        prepare="triton", outputs="triton", saves_states=False, states="triton", remainders=half, fused_backward=False,
        backward_state="triton", backward_chunk="triton",
    )  # fmt: skip
    if chunks_per_write > 1 or (chunks_per_write and not has_do):
        # Gluon takes no factors of several chunks, nor factors without dO; only `prepare`, which reads no factors, may
        # run in Gluon
        return portable._replace(backward_segment=0, prepare="gluon" if gluon else "triton")
    if not gluon:
        return portable

    equal, wide = K == V, max(K, V) > 128
    # save S's rounding errors unless the kernels that compute ⟨dS', S⟩ (the decays' gradient) read rounded states
    # anyway
    remainders = not (has_do and equal and not wide)
    outputs = states = "triton"
    if K == V == 128:
        outputs, states = "gluon", "gluon tiled" if remainders else "gluon"
    elif K > 64:
        # a launch of the tiled kernel stores either o, or R and the states S with their rounding errors
        outputs, states = "gluon tiled", "gluon tiled" if remainders else "triton"
    backward_state = backward_chunk = "triton"
    if has_do:
        # the kernel "gluon" has one warpgroup per 64 columns of V. With K = 128 and V = 64 this single warpgroup is
        # slower than the two of the tiled kernel
        backward_state = "gluon" if not wide and (equal or V == 128) else "gluon tiled"
    if has_do and qk_l2norm:
        backward_chunk = "gluon tiled" if wide else "gluon"
    return portable._replace(
        prepare="gluon",
        outputs=outputs,
        saves_states=K == V == 128 and buffer_bytes(state_layouts(k, v, cu_seqlens)) <= tuning.MOST_SAVED_BYTES,
        states=states,
        remainders=remainders,
        # the fused kernel takes heads of 128 with normalised q and k, without `writes`
        fused_backward=backward_chunk == "gluon" and K == V == 128 and not chunks_per_write and _busy(fused_programs),
        backward_state=backward_state,
        backward_chunk=backward_chunk,
    )


def _busy(programs: int) -> bool:
    """True if `programs`, each alone on an SM, fill at least the fraction `_BUSY` of the SMs in their waves."""
    return programs >= _BUSY * one_wave() * cdiv(programs, one_wave())


def head_parts(k: Tensor, v: Tensor, impl: str | None, chunks_per_write: int = 0) -> int:
    """Return into how many heads of 128 a head of V is split: two for V = 256 with K = 128 in Gluon, else 1.

    If several chunks share a write factor, which only portable kernels take, it is 1, too.
    Columns of the state are independent. Kernels for heads of 128 took two thirds of the time of kernels for 256.
    """
    if k.shape[-1] != 128 or v.shape[-1] != 256 or chunks_per_write > 1:
        return 1
    gluon = GLUON.limit(k.device, k.dtype) is None if impl is None else impl == "gluon"
    return 2 if gluon else 1


def programs_per_head(k: Tensor, v: Tensor, impl: str | None) -> int:
    """Return programs per sequence and value head: one per 64 columns of V if K or V is 256 and Gluon can run, else 1.

    The forward and the backward pass must agree on the segments, which depend on this number. So the number depends on
    the device and the dtype, but not on whether Gluon kernels compiled, which may change between the two passes.
    """
    wide = max(k.shape[-1], v.shape[-1]) > 128 and impl != "triton" and GLUON.limit(k.device, k.dtype) is None
    return v.shape[-1] // 64 if wide else 1


def forward_segment(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, impl: str | None, chunks_per_write: int) -> int:
    """Return `GDNPlan.segment`, rounded up to a multiple of the chunks that share a factor of `writes`."""
    N, tokens = num_sequences(k, cu_seqlens), k.shape[0] * k.shape[1]
    programs = programs_per_head(k, v, "triton" if chunks_per_write > 1 else impl)
    segment = tuning.segment_tokens(N, v.shape[2], tokens, programs)
    whole = CHUNK * max(1, chunks_per_write)
    segment = cdiv(segment, whole) * whole
    return segment if segment < tokens else 0
