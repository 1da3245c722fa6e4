"""One rank's share of sequences that are split over ranks: maps of its tokens, outputs and gradients.

The rank cuts each span of consecutive tokens into rows, which kernels take as sequences of their own. A row maps the
state S before it to M S + L (`row_maps`). `scan_rows` composes the maps of a span's rows, or applies them to the state
that enters the span. The gradient of the state before a row is Mᵀ dS' + G, with dS' of the state after the row and the
local gradient G (`local_gradients`); `scan_rows` with `reverse` passes it through the rows.

Kernels take the heads of `head_split.split_heads`. Keys of norm 1 let them omit rows, as between segments
(`sequence_split`): a row whose decay is below the limit has no M, and only its last chunks enter L.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.tuning import FLOAT32_DOT, one_wave
from tokenmix_core.ops.autograd import of_fields, retried
from tokenmix_core.ops.gated_delta_rule import head_split, tuning
from tokenmix_core.ops.gated_delta_rule.backward_state import backward_state
from tokenmix_core.ops.gated_delta_rule.chunk import chunk_backward, chunk_forward
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, dot_precision, split_values
from tokenmix_core.ops.gated_delta_rule.forward import empty_saved, forward
from tokenmix_core.ops.gated_delta_rule.plan import head_parts, plan, programs_per_head
from tokenmix_core.ops.gated_delta_rule.prepare import prepare
from tokenmix_core.ops.gated_delta_rule.sequence_split import segment_kernel, segment_states
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Inputs, Reverse, Saved, Terms
from tokenmix_core.ops.slots import slot_arguments

# least number of tokens in a row, if a span has several
LEAST_ROW = 1024


Tensors = tuple[Any, ...]


class RowMaps(NamedTuple):
    """Ã and the gates of rows (`Terms`), and the rows' maps.

    Attributes:
        transitions: M, float32 `[rows, HV, K, K]`; undefined where `carries` is 0.
        states: L, float32 `[rows, HV, K, V]`.
        carries: int32 `[rows, HV]`; 0 if M is negligible.
    """

    inverse: Tensor
    gates: Tensor
    transitions: Tensor
    states: Tensor
    carries: Tensor


class PreparedInputs(NamedTuple):
    """Ã and the gates, then the call's arguments, whose initial states enter the rows."""

    inverse: Tensor
    gates: Tensor
    inputs: Inputs


class LocalInputs(NamedTuple):
    """The gradient of the outputs, then as `PreparedInputs`."""

    do: Tensor
    inverse: Tensor
    gates: Tensor
    inputs: Inputs


class BackwardInputs(NamedTuple):
    """Gradients of outputs and of the states after rows, R and the chunk states (`Saved`), then as `PreparedInputs`."""

    do: Tensor
    dfinal_state: Tensor | None
    residual: Tensor
    states: Tensor
    remainders: Tensor | None
    inverse: Tensor
    gates: Tensor
    inputs: Inputs


class Spans:
    """The gated delta rule of a rank's spans: the `parallel.kernel_scans.SpanScan` of one call.

    A span has a multiple of `CHUNK` tokens; `x` has the call's options and the rank's k and v.
    """

    def __init__(self, x: Inputs):
        self.options = x[6:]
        self.parts = head_parts(x.k, x.v, x.impl)
        self.rows = 1

    def _inputs(self, saved: Sequence[Tensor]) -> tuple[Inputs, RowMaps]:
        """Return the rows, whose initial states are `RowMaps.states`, and their maps."""
        maps = RowMaps(*saved[5:])
        return Inputs(*saved[:5], maps.states, *self.options), maps

    def split_states(self, states: Tensor) -> Tensor:
        """Return states with the heads that kernels take."""
        return states if self.parts == 1 else head_split.split_states(states, self.parts)

    def join_states(self, states: Tensor) -> Tensor:
        """Undo `split_states`."""
        return states if self.parts == 1 else head_split.join_states(states, self.parts)

    def maps(self, tensors: Tensors, initial: Tensor | None) -> tuple[Tensors, Tensor]:
        """Return tensors to save, and M and L of each span in one tensor; L starts from `initial`."""
        x, _ = head_split.split_heads(Inputs(*tensors, None, *self.options).aligned())
        self.rows = rows_per_span(x)
        count, length = len(x.v) * self.rows, x.v.shape[1] // self.rows
        cut = tuple(t.view(count, length, *t.shape[2:]) for t in x[:5])
        maps = RowMaps(*row_maps(*cut, None, *self.options))
        _, found = scan_rows(maps, maps.states, initial, self.rows, compose=True)
        return (*cut, *maps), found

    def unpacked(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Return M and L of all spans."""
        K = gathered.shape[-2]
        return gathered[..., -K:], gathered[..., :-K]

    def outputs(self, saved: Tensors, entering: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        """Return outputs, the states after spans, and the tensors to save, from the states that enter spans."""
        x, maps = self._inputs(saved)
        entering, after = scan_rows(maps, maps.states, entering, self.rows)
        o = row_outputs(maps.inverse, maps.gates, *x._replace(initial_state=entering))
        return head_split.join_outputs(o, None, self.parts)[0], after, (*saved[:5], *maps._replace(states=entering))

    @retried
    def local_gradients(self, saved: Sequence[Tensor], do: Tensor, after: Tensor | None) -> tuple[Tensors, Tensor]:
        """Return tensors for `gradients`, and the gradient of the state before each span.

        `after` are gradients of the states after spans; None for zero.
        """
        x, maps = self._inputs(saved)
        do = split_values(do, self.parts).view(x.v.shape)
        by = plan(x.k, x.v, None, x.qk_l2norm, x.impl, others=(x.q, do))
        computed = ()
        if by.backward_state == "gluon":
            local = local_gradients(do, maps.inverse, maps.gates, *x)
        else:
            computed = row_states(do, maps.inverse, maps.gates, *x)
            local = scanned_gradients(do, None, *computed, maps.inverse, maps.gates, *x)
        _, found = scan_rows(maps, local, after, self.rows, reverse=True)
        return (do, local, *computed), found

    def recomputed(self, saved: Sequence[Tensor], kept: Tensors) -> Tensors:
        """Return `kept` with R and the chunk states; this runs while gradients travel."""
        x, maps = self._inputs(saved)
        return kept if len(kept) > 2 else (*kept, *row_states(kept[0], maps.inverse, maps.gates, *x))

    def gradients(self, saved: Sequence[Tensor], kept: Tensors, leaving: Tensor) -> tuple[Tensors, Tensor]:
        """Return the gradients of the tensors of `maps`, and of the states before spans.

        `leaving` are the complete gradients of the states after spans.
        """
        (x, maps), (do, local, *computed) = self._inputs(saved), kept
        leaving, before = scan_rows(maps, local, leaving, self.rows, reverse=True)
        grads = Gradients(*row_gradients(do, leaving, *computed, maps.inverse, maps.gates, *x))
        return head_split.join_gradients(grads._replace(initial_state=None), self.parts)[:5], before


def rows_per_span(x: Inputs) -> int:
    """Return into how many equal rows of whole chunks each span is cut, so that all rows fit in one wave of programs.

    Several rows have at least `LEAST_ROW` tokens each. x has one sequence per span, of a multiple of `CHUNK` tokens.
    """
    spans, tokens, HV, _ = x.v.shape
    most = min(one_wave() // (spans * HV * programs_per_head(x.k, x.v, x.impl)), tokens // LEAST_ROW)
    return next(rows for rows in range(max(most, 1), 0, -1) if tokens % (rows * CHUNK) == 0)


@retried
@Replayed
@of_fields
def row_maps(x: Inputs) -> RowMaps:
    """Return M and L of each row, and the tensors that later passes take; each sequence of x is a row."""
    B, T, H, K = x.k.shape
    HV, V = x.v.shape[2:]
    by = plan(x.k, x.v, None, x.qk_l2norm, x.impl, others=(x.q,))
    inverse, gates = prepare(k=x.k, g=x.g, beta=x.beta, cu_seqlens=None, qk_l2norm=x.qk_l2norm, form=by.prepare)
    states, transitions = gates.new_empty(B, HV, K, V), gates.new_empty(B, HV, K, K)
    carries = gates.new_empty(B, HV, dtype=torch.int32)
    launch = tuning.scan_tile("segment", K, V, x.k.element_size(), B * HV)
    BV = min(K, V, launch.BV)
    segment_kernel[(B * HV * ((K + V) // BV),)](
        k=x.k, v=x.v, inverse=inverse, gates=gates, writes=None, initial_state=None, **slot_arguments(None),
        PARTS=1, cu_seqlens=None, states=states, transitions=transitions, carries=carries, T=T, N=B,
        H=H, group=HV // H, tokens=B * T, segment=T, K=K, V=V, BT=CHUNK, BV=BV, WRITES=0, L2NORM=x.qk_l2norm,
        PACKED=False, DOT=dot_precision(x.k), num_warps=launch.num_warps, num_stages=launch.num_stages,
        maxnreg=launch.maxnreg,
    )  # fmt: skip
    return RowMaps(inverse, gates, transitions, states, carries)


@retried
@Replayed
@of_fields
def row_outputs(given: PreparedInputs) -> Tensor:
    """Return the rows' outputs."""
    return chunk_forward(given.inputs, prepared=(given.inverse, given.gates)).o


@Replayed
@of_fields
def local_gradients(given: LocalInputs) -> Tensor:
    """Return G, the gradient of the state before each row that ignores the state after it, by the Gluon kernel."""
    from tokenmix_core.ops.gated_delta_rule.hopper.backward_state import initial_gradients

    do, inverse, gates, x = given
    # the kernel reads neither R nor chunk states
    return initial_gradients(Reverse(x, Terms(inverse, gates, None, None), Saved(do, do), do, None, x.q.shape[1]))


@retried
@Replayed
@of_fields
def row_states(given: LocalInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the residuals R, the chunk states and, if the backward pass reads them, these states' rounding errors."""
    do, inverse, gates, x = given
    by = plan(x.k, x.v, None, x.qk_l2norm, x.impl, others=(x.q, do))
    entering, transitions = segment_states(x, inverse=inverse, gates=gates, segment=by.segment)
    saved = empty_saved(x, by.remainders)
    forward(
        x, Terms(inverse, gates, entering, transitions), segment=by.segment, form=by.states, output=False, saved=saved
    )
    return saved.residual, saved.states, saved.remainders


@retried
@Replayed
@of_fields
def scanned_gradients(given: BackwardInputs) -> Tensor:
    """Return G by the kernel of the whole reverse scan."""
    do, _, residual, states, remainders, inverse, gates, x = given
    by = plan(x.k, x.v, None, x.qk_l2norm, x.impl, others=(x.q, do))
    saved = Saved(residual, states, remainders)
    reverse = Reverse(x, Terms(inverse, gates, None, None), saved, do, None, x.q.shape[1])
    found = backward_state(reverse, form=by.backward_state).dinitial_state
    assert found is not None, "rows have initial states"
    return found


@retried
@Replayed
@of_fields
def row_gradients(given: BackwardInputs) -> Gradients:
    """Return all gradients; those of the initial states are of the states before rows."""
    saved = Saved(given.residual, given.states, given.remainders)
    return chunk_backward(
        given.inputs, inverse=given.inverse, gates=given.gates, segments=None, saved=saved, do=given.do,
        dfinal_state=given.dfinal_state,
    )  # fmt: skip


@cached_launch
@triton.jit(do_not_specialize=["rows", "HV"])
def scan_rows_kernel(
    states, transitions, carries, initial, before, after, rows, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr, REVERSE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Scan a span's rows, BV of WIDTH columns per program: S ← M S + L or, from the last row on, S ← Mᵀ S + L.

    Columns from V on have L = 0 and start from the identity: they become M of the span. S before each step is stored in
    `before`, the last S in `after`.
    """
    i_v, i_ph = tl.program_id(0) % (WIDTH // BV), tl.program_id(0) // (WIDTH // BV)
    i_p, i_hv = i_ph // HV, i_ph % HV
    o_k, o_b, o_v = tl.arange(0, K), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    p_tile, p_part = o_k[:, None] * WIDTH + o_v[None, :], o_b[:, None] * WIDTH + o_v[None, :]
    p_local, m_local = o_k[:, None] * V + o_v[None, :], (o_v < V)[None, :]
    b_s = tl.where(o_v[None, :] - V == o_k[:, None], 1.0, 0.0)
    if initial is not None:
        b_s += tl.load(initial + i_ph.to(tl.int64) * K * V + p_local, mask=m_local, other=0.0)
    for i in range(rows):
        i_r = rows - 1 - i if REVERSE else i
        i_row = (i_p * rows + i_r).to(tl.int64) * HV + i_hv
        p_s, p_m = before + i_row * K * WIDTH, transitions + i_row * K * K
        tl.store(p_s + p_tile, b_s)
        b_s = tl.load(states + i_row * K * V + p_local, mask=m_local, other=0.0)
        if tl.load(carries + i_row) > 0:
            # the barrier makes the stored state visible to all threads, which read BK rows at a time
            tl.debug_barrier()
            for i_k in range(K // BK):
                o_row = i_k * BK + o_b
                if REVERSE:
                    b_m = tl.load(p_m + o_row[None, :] * K + o_k[:, None])
                else:
                    b_m = tl.load(p_m + o_k[:, None] * K + o_row[None, :])
                b_s = tl.dot(b_m, tl.load(p_s + i_k * BK * WIDTH + p_part), b_s, input_precision=DOT)
    tl.store(after + i_ph.to(tl.int64) * K * WIDTH + p_tile, b_s)


def scan_rows(
    maps: RowMaps, local: Tensor, initial: Tensor | None, rows: int, *, compose: bool = False, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the states before each row, and those after each span of `rows` rows, in float32.

    Args:
        maps: the rows' transitions.
        local: L of each row or, with `reverse`, G.
        initial: the states before each span `[spans, HV, K, V]` or, with `reverse`, the gradients of the states after
            it; None for zero.
        compose: append the span's M, as columns from V on. The states before the rows are then of no use.
        reverse: start after the last row of each span, and apply Mᵀ; the results are gradients of the states after each
            row, and of those before each span.
    """
    count, HV, K, V = local.shape
    width = V + K if compose else V
    before, after = local.new_empty(count, HV, K, width), local.new_empty(count // rows, HV, K, width)
    launch = tuning.scan_tile("entering", K, V, 4, HV)
    scan_rows_kernel[(count // rows * HV * (width // launch.BV),)](
        states=local, transitions=maps.transitions, carries=maps.carries, initial=initial, before=before, after=after,
        rows=rows, HV=HV, K=K, V=V, BK=launch.BK, BV=launch.BV, WIDTH=width, REVERSE=reverse, DOT=FLOAT32_DOT,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return before, after
