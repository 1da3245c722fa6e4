"""Which kernels make each step of a call, and how sequences are cut up for them: decided here, once for a pass.

Shapes, dtype, device and alignment decide, never the numbers in tensors. The step launchers follow the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots, num_sequences
from tokenmix_core.kernels.tuning import one_round
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

# the share of SMs, each of which has room for one program of a step that walks along chunks with all work
# of theirs, that a round keeps busy; fewer leave so many idle that two steps are quicker, the second of which takes all
# chunks at once
_BUSY = 96 / 132

# portable kernels; or in Gluon those of heads of 64 or 128, or those that share wide or unequal heads out in tiles
Form = Literal["triton", "gluon", "gluon tiled"]


class GDNPlan(NamedTuple):
    """The kernels of each step, and the cuts of sequences.

    Attributes:
        segment: tokens of the segments that the forward pass takes side by side, a multiple of 64; 0: whole sequences.
        reverse_segment: the same for the reverse pass over chunks, which portable kernels make in whole sequences.
        prepare: makes Ã and the gates.
        outputs: makes o from them.
        keeps: whether the forward pass keeps R and the states of chunks for the backward pass.
        states: makes R and the states of chunks for the backward pass.
        remainders: whether `states` also keeps what rounding to 16 bits took from them.
        at_once: whether one step in Gluon makes all gradients, in place of the two that follow.
        reverse: makes dV and the gradients of the states, in reverse.
        chunks: makes the other gradients, all chunks at once.
    """

    segment: int
    reverse_segment: int
    prepare: Form
    outputs: Form
    keeps: bool
    states: Form
    remainders: bool
    at_once: bool
    reverse: Form
    chunks: Form


def plan(
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    impl: str | None,
    *,
    others: Sequence[Tensor | None] = (),
    through_outputs: bool = True,
    run: int = 0,
) -> GDNPlan:
    """The plan of a call with these keys and values.

    Args:
        k, v: `[B, T, H, K]`, `[B, T, HV, V]`.
        cu_seqlens, qk_l2norm, impl: the call's.
        others: what else is read by rows: queries, gradients of the outputs.
        through_outputs: whether the backward pass begins at the outputs, or at final states alone.
        run: chunks that share a factor of `writes`; 0 where all is written.

    Raises:
        ValueError: `impl` is "gluon" and kernels in Gluon do not run.
    """
    even = all(x is None or x.data_ptr() % 16 == 0 for x in (k, v, *others))
    limit = None if even else "takes tensors that begin at multiples of 16 bytes"
    if run > 1 and impl == "gluon":
        limit = "takes `writes` for chunks of 64 tokens alone"
    gluon = GLUON.runs(impl, k.device, k.dtype, limit)
    (B, T, _, K), (HV, V) = k.shape, v.shape[2:]
    half, packed = k.element_size() == 2, cu_seqlens is not None
    parts = walks(k, v, "triton" if run > 1 else impl)
    shape = num_sequences(k, cu_seqlens), HV, B * T
    # only norms of 1 bound what a segment of the reverse pass may leave out
    reverse_segment = tuning.backward_segment_tokens(*shape, packed, parts) if qk_l2norm else 0
    programs = chunk_slots(B, T, reverse_segment or cdiv(T, CHUNK) * CHUNK, cu_seqlens) * HV
    segment = forward_segment(k, v, cu_seqlens, impl, run)
    portable = GDNPlan(
        segment=segment, reverse_segment=reverse_segment, prepare="triton", outputs="triton", keeps=False,
        states="triton", remainders=half, at_once=False, reverse="triton", chunks="triton",
    )  # fmt: skip
    if run > 1 or (run and not through_outputs):
        # what a chunk's keys and gates decide knows nothing of writes
        return portable._replace(reverse_segment=0, prepare="gluon" if gluon else "triton")
    if not gluon:
        return portable

    equal, wide = K == V, max(K, V) > 128
    # ⟨dS', S⟩ is then summed from what is stored in 16 bits alone
    remainders = not (through_outputs and equal and not wide)
    outputs = states = "triton"
    if K == V == 128:
        outputs, states = "gluon", "gluon tiled" if remainders else "gluon"
    elif K > 64:
        # which keep either o or R, S and its remainders
        outputs, states = "gluon tiled", "gluon tiled" if remainders else "triton"
    reverse = chunks = "triton"
    if through_outputs:
        # eight warps have all columns of V, where there are 128
        reverse = "gluon" if not wide and (equal or V == 128) else "gluon tiled"
    if through_outputs and qk_l2norm:
        chunks = "gluon tiled" if wide else "gluon"
    return GDNPlan(
        segment=segment,
        reverse_segment=reverse_segment,
        prepare="gluon",
        outputs=outputs,
        keeps=K == V == 128 and buffer_bytes(state_layouts(k, v, cu_seqlens)) <= tuning.MOST_SAVED_BYTES,
        states=states,
        remainders=remainders,
        # of normalised heads of 128, where programs keep a GPU busy; it knows no writes
        at_once=chunks == "gluon" and K == V == 128 and not run and _busy(programs),
        reverse=reverse,
        chunks=chunks,
    )


def _busy(programs: int) -> bool:
    """Tell whether rounds of a program a SM keep enough of them busy."""
    return programs >= _BUSY * one_round() * cdiv(programs, one_round())


def narrow_heads(k: Tensor, v: Tensor, impl: str | None, run: int = 0) -> int:
    """Heads of 128 that kernels see in each one of V: two where 256 columns are written with keys of 128 in Gluon.

    Columns of the state know nothing of one another, and kernels for heads of 128 took two thirds of the time.
    """
    if k.shape[-1] != 128 or v.shape[-1] != 256 or run > 1:
        return 1
    gluon = GLUON.limit(k.device, k.dtype) is None if impl is None else impl == "gluon"
    return 2 if gluon else 1


def walks(k: Tensor, v: Tensor, impl: str | None) -> int:
    """Programs along a sequence and value head: in Gluon heads of 256 are shared out by 64 columns of V.

    What is cut up so stays as it is from the forward to the backward pass, also if kernels do not compile in between.
    """
    wide = max(k.shape[-1], v.shape[-1]) > 128 and impl != "triton" and GLUON.limit(k.device, k.dtype) is None
    return v.shape[-1] // 64 if wide else 1


def forward_segment(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, impl: str | None, run: int = 0) -> int:
    """`GDNPlan.segment` alone: what the shapes of a call's results depend on. Segments are whole runs of `writes`."""
    N, tokens = num_sequences(k, cu_seqlens), k.shape[0] * k.shape[1]
    parts = walks(k, v, "triton" if run > 1 else impl)
    segment = tuning.segment_tokens(N, v.shape[2], tokens, parts)
    whole = CHUNK * max(1, run)
    segment = cdiv(segment, whole) * whole
    return segment if segment < tokens else 0
