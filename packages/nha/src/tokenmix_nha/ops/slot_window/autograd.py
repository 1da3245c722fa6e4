"""The kernels as torch custom ops: launches forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.launch.kernels import compiled_together
from tokenmix_core.launch.replay import Replayed, is_plain
from tokenmix_core.ops.common import aligned, differentiable, parts_of, recorded_op, retried, room_for
from tokenmix_nha.ops.slot_window import tuning
from tokenmix_nha.ops.slot_window.backward_gates import slot_window_backward_gates_kernel
from tokenmix_nha.ops.slot_window.backward_keys import slot_window_backward_keys_kernel
from tokenmix_nha.ops.slot_window.backward_queries import slot_window_backward_queries_kernel
from tokenmix_nha.ops.slot_window.backward_values import slot_window_backward_values_kernel
from tokenmix_nha.ops.slot_window.forward import slot_window_forward_kernel
from tokenmix_nha.ops.slot_window.plan import plan
from tokenmix_nha.ops.slot_window.states import (
    carry,
    slot_gates_kernel,
    slot_gradients_kernel,
    slot_states_kernel,
)

_Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Layout(NamedTuple):
    """Sizes that the launches of a call share; `Grid` numbers in README.md's terms."""

    BT: int
    heads: int
    sequences: int
    # chunks of queries that come before any token enters the slots, and the tokens by which these overhang
    lead: int
    extra: int
    # by row, or in all of a packed batch
    query_chunks: int
    key_chunks: int
    entries: int
    rows: int
    # slots of a tile in Triton's kernels that take all of them at once
    slots: int
    constants: dict


def _layout(q, k, v, f, k_slots, start, cu_seqlens, before: int, window: int) -> Layout:
    batch, tokens, heads_q, K = q.shape
    keys, heads, slots = f.shape[1:]
    BT = tuning.chunk_size(q.dtype)
    lead = max(cdiv(window - before, BT), 0)
    extra = lead * BT - (window - before)
    packed = cu_seqlens is not None
    # not its length, which traced graphs would take for a constant
    sequences = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else batch
    if packed:
        query_chunks = (tokens + sequences * extra) // BT + sequences
        key_chunks = keys // BT + sequences
        entries = keys // BT + 2 * sequences
    else:
        query_chunks = cdiv(tokens + extra, BT)
        key_chunks = cdiv(keys, BT)
        entries = cdiv(max(keys - window, 0), BT) + 1
    group = heads_q // heads
    constants = dict(
        M=tuning.slot_tile(slots, q.dtype, k_slots is not None, group), SLOTS=slots, K=K, V=v.shape[3], BT=BT,
        GROUP=group, OWN_SLOT_KEYS=k_slots is not None, HAS_START=start is not None, PACKED=packed,
        FACTOR=triton.language.bfloat16 if q.dtype == torch.bfloat16 else triton.language.float32,
        DOT="ieee" if q.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    rows = 1 if packed else batch
    whole = tuning.whole_tile(constants["M"], q.dtype)
    return Layout(BT, heads, sequences, lead, extra, query_chunks, key_chunks, entries, rows, whole, constants)


class Gates(NamedTuple):
    """The cumulative gates of a chunk, by token and slot: `slot_gates_kernel`."""

    weight: Tensor
    row: Tensor
    column: Tensor


def _gates(launch, q, f, end, splits, cu_seqlens, before: int, window: int, y: Layout, only_strong: bool) -> Gates:
    """Fill `end` and `splits`, the chunks' decays and how often to halve them, which tells which are `only_strong`."""
    M, BT = y.constants["M"], y.BT
    shape = (y.entries * y.rows, y.heads, BT, M)
    factor = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    gates = Gates(*(q.new_empty(shape, dtype=dtype) for dtype in (q.dtype, torch.float32, factor)))
    heads = tuning.strong_heads(y.key_chunks * y.rows, y.heads) if only_strong else 1
    launch(
        slot_gates_kernel, (y.key_chunks * y.rows, cdiv(y.heads, heads)),
        f, *gates, end, splits, cu_seqlens, q.shape[1], y.sequences, y.heads, before, window, y.key_chunks, y.entries,
        M=M, SLOTS=f.shape[3], BM=y.slots, BT=BT, HEADS=heads, PACKED=y.constants["PACKED"], DOT=y.constants["DOT"],
        ONLY_STRONG=only_strong, num_warps=4,
    )  # fmt: skip
    return gates


@retried
def _run(
    q, k, v, f, q_slots, k_slots, slots_k, slots_v, start, cu_seqlens, before: int, window: int, scale: float,
    impl: str | None = None, kept: Sequence[Tensor] | None = None,
) -> _Eight:  # fmt: skip
    """All outputs; those that the backward pass needs may be given as `kept`."""
    q, k, v, f, q_slots, k_slots, slots_k, slots_v = map(aligned, (q, k, v, f, q_slots, k_slots, slots_k, slots_v))
    y = _layout(q, k, v, f, k_slots, start, cu_seqlens, before, window)
    o, final_k, final_v, lse, end, splits, states_k, states_v = outputs = (
        *_results(q, v, f, y), *(kept or _empty(q, _kept_layouts(q, y)))
    )  # fmt: skip
    M, K, V = (y.constants[x] for x in "MKV")
    with compiled_together() as launch:
        if plan(M, window, impl, q, k, v, f, q_slots, k_slots).forward == "gluon":
            from tokenmix_nha.ops.slot_window.hopper.forward import hopper_window_forward
            from tokenmix_nha.ops.slot_window.hopper.states import hopper_slot_states

            walk = tuning.hopper_walk(y.sequences * y.heads, y.entries)
            hopper_slot_states(
                launch, k if k_slots is None else k_slots, v, f, slots_k, slots_v, cu_seqlens, _local(walk, y, q),
                outputs, q.shape[1], before, window, walk, y,
            )  # fmt: skip
            hopper_window_forward(
                launch, q, k, v, f, q_slots, k_slots, start, cu_seqlens, outputs, before, window, scale, y
            )
            # strong chunks find their factors themselves
            row, column, kinds = None, None, (True,)
        else:
            weight, row, column = _gates(launch, q, f, end, splits, cu_seqlens, before, window, y, False)
            kinds = False, True
            walk = tuning.walk(y.sequences * y.heads, y.entries, M, q.dtype)
            local = _local(walk, y, q)
            for is_local in (True, False) if walk.segments > 1 else (False,):
                launch(
                    slot_states_kernel, (walk.segments * y.sequences * y.heads, walk.ND),
                    k if k_slots is None else k_slots, v, weight, end, slots_k, slots_v, cu_seqlens, *local,
                    states_k, states_v, final_k, final_v, q.shape[1], y.sequences * y.heads, y.heads, before, window,
                    y.entries, walk.segments, M=M, SLOTS=f.shape[3], BM=y.slots, K=K, V=V, BT=y.BT, ND=walk.ND,
                    HAS_INITIAL=slots_k is not None, PACKED=y.constants["PACKED"], LOCAL=is_local,
                    DOT=y.constants["DOT"], num_warps=walk.num_warps, num_stages=walk.num_stages,
                )  # fmt: skip
                if is_local:
                    carry(launch, slots_k, slots_v, local, f.shape[3], walk.segments, backward=False)
        t = tuning.tile(M, window, q.dtype)
        for strong in kinds:
            heads = tuning.strong_heads(y.query_chunks * y.rows, q.shape[2]) if strong else 1
            launch(
                slot_window_forward_kernel, (y.query_chunks * y.rows, cdiv(q.shape[2], heads)),
                q, k, v, f, q_slots, k_slots, splits, row, column, states_k, states_v, start, cu_seqlens, o, lse,
                scale, q.shape[1], y.sequences, y.heads, before, window, y.query_chunks, y.entries, y.extra, y.lead,
                **y.constants, BM=y.slots, STRONG=strong, HEADS=heads, BN=t.BN, num_warps=t.num_warps,
                num_stages=t.num_stages,
            )  # fmt: skip
    return o, final_k, final_v, lse, end, splits, states_k, states_v


def _empty(x: Tensor, layouts: Sequence[tuple]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in layouts)


def _results(q: Tensor, v: Tensor, f: Tensor, y: Layout) -> tuple[Tensor, ...]:
    """o and the final slots."""
    K, V = y.constants["K"], y.constants["V"]
    slots = y.sequences, y.heads, f.shape[3]
    return _empty(q, (((*q.shape[:3], V), q.dtype), ((*slots, K), torch.float32), ((*slots, V), torch.float32)))


def _kept_layouts(q: Tensor, y: Layout) -> tuple[tuple, ...]:
    """Log-sum-exp, decays, splits and slots of chunks."""
    M, K, V = (y.constants[x] for x in "MKV")
    tiles = y.entries * y.rows, y.heads
    small = (q.shape[:3], torch.float32), ((*tiles, M), torch.float32), (tiles, torch.int32)
    return *small, ((*tiles, K, M), q.dtype), ((*tiles, V, M), q.dtype)


def _outputs(q, k, v, f, q_slots, k_slots, slots_k, slots_v, start, cu_seqlens, before, window, scale, impl=None):
    y = _layout(q, k, v, f, k_slots, start, cu_seqlens, before, window)
    return *_results(q, v, f, y), *_empty(q, _kept_layouts(q, y))


@recorded_op("tokenmix_nha::slot_window_attention", mutates_args=())
def slot_window_attention_op(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, q_slots: Tensor | None, k_slots: Tensor | None, slots_k: Tensor | None,
    slots_v: Tensor | None, start: Tensor | None, cu_seqlens: Tensor | None, before: int, window: int, scale: float,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, final slots of keys and values, and for the backward pass: log-sum-exp, decays, splits and slots of chunks."""
    return _run(q, k, v, f, q_slots, k_slots, slots_k, slots_v, start, cu_seqlens, before, window, scale, impl)


slot_window_attention_op.register_fake(_outputs)


def _local(walk: tuning.Walk, y: Layout, q: Tensor) -> tuple[Tensor | None, ...]:
    """The slots and decays that the segments of a sequence leave for the later ones."""
    if walk.segments == 1:
        return None, None, None
    M, K, V = (y.constants[x] for x in "MKV")
    heads = walk.segments * y.sequences * y.heads
    return tuple(q.new_empty(heads, *shape, dtype=torch.float32) for shape in ((K, M), (V, M), (M,)))


@retried
def _run_backward(
    q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, lse, end, splits, states_k, states_v, do, dfinal_k, dfinal_v,
    before: int, window: int, scale: float, impl: str | None, initial: bool,
) -> _Eight:  # fmt: skip
    q, k, v, f, q_slots, k_slots = map(aligned, (q, k, v, f, q_slots, k_slots))
    do, dfinal_k, dfinal_v = map(aligned, (torch.zeros_like(o) if do is None else do, dfinal_k, dfinal_v))
    y = _layout(q, k, v, f, k_slots, start, cu_seqlens, before, window)
    M, K, V = (y.constants[x] for x in "MKV")
    dq, dk, dv, df, dq_slots, dk_slots, dinitial_k, dinitial_v = gradients = _empty_gradients(
        q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, lse, end, splits, states_k, states_v, do, dfinal_k,
        dfinal_v, before, window, scale, impl, initial,
    )  # fmt: skip
    own = y.constants["OWN_SLOT_KEYS"]
    group = y.constants["GROUP"]
    hopper = plan(M, window, impl, q, k, v, do, q_slots, k_slots).backward == "gluon"
    with compiled_together() as launch:
        # no kernel for weak chunks reads any other's
        gates = _gates(launch, q, f, end, splits, cu_seqlens, before, window, y, hopper)
        p, dz = (q.new_empty(*q.shape[:3], M, dtype=gates.column.dtype) for _ in range(2))
        x, delta = q.new_empty(*q.shape[:3], M, dtype=torch.float32), torch.empty_like(lse)
        t = tuning.tile(M, window, q.dtype)
        if hopper:
            from tokenmix_nha.ops.slot_window.hopper.backward_queries import hopper_backward_queries_kernel

            launch(
                hopper_backward_queries_kernel, (y.query_chunks * y.rows * q.shape[2],),
                q, k, v, f, q_slots, k_slots, splits, states_k, states_v, start, cu_seqlens, o, lse, do, dq, dq_slots,
                p, dz, x, delta, scale, q.shape[1], y.sequences, y.heads, before, window, y.query_chunks, y.entries,
                y.extra, y.lead, M, f.shape[3], K, V, group, own, start is not None, y.constants["PACKED"],
                window <= 64, num_warps=4,
            )  # fmt: skip
        for strong in (True,) if hopper else (False, True):
            heads = tuning.strong_heads(y.query_chunks * y.rows, q.shape[2]) if strong else 1
            launch(
                slot_window_backward_queries_kernel, (y.query_chunks * y.rows, cdiv(q.shape[2], heads)),
                q, k, v, f, q_slots, k_slots, splits, gates.row, gates.column, states_k, states_v, start, cu_seqlens, o,
                lse, do, dq, dq_slots, p, dz, x, delta, scale, q.shape[1], y.sequences, y.heads, before, window,
                y.query_chunks, y.entries, y.extra, y.lead, **y.constants, STRONG=strong, HEADS=heads,
                SHORT=window <= 64, BM=t.BM, BN=t.BN, num_warps=t.num_warps, num_stages=t.num_stages,
            )  # fmt: skip
        walk = tuning.walk(y.sequences * y.heads, y.entries, M, q.dtype)
        ds_k, ds_v = torch.empty_like(states_k), torch.empty_like(states_v)
        local = _local(walk, y, q)
        for is_local in (True, False) if walk.segments > 1 else (False,):
            launch(
                slot_gradients_kernel, (walk.segments * y.sequences * y.heads, walk.ND),
                q if q_slots is None else q_slots, do, p, dz, f, end, splits, dfinal_k, dfinal_v, cu_seqlens, *local,
                ds_k, ds_v, dinitial_k, dinitial_v, q.shape[1], y.sequences * y.heads, y.heads, before, window,
                y.entries, walk.segments, y.lead if initial else 0, M=M, SLOTS=f.shape[3], BM=y.slots,
                K=K, V=V, BT=y.BT, ND=walk.ND, GROUP=y.constants["GROUP"], PACKED=y.constants["PACKED"],
                LOCAL=is_local, DOT=y.constants["DOT"], num_warps=walk.num_warps, num_stages=walk.num_stages,
            )  # fmt: skip
            if is_local:
                carry(launch, dfinal_k, dfinal_v, local, f.shape[3], walk.segments, backward=True)
        sizes = scale, q.shape[1], y.sequences, y.heads, before, window, y.key_chunks, y.entries
        shared = {name: x for name, x in y.constants.items() if name != "OWN_SLOT_KEYS"}
        if hopper:
            weak, packed = (y.key_chunks * y.rows * y.heads,), y.constants["PACKED"]
        if hopper and M == 32:
            from tokenmix_nha.ops.slot_window.hopper.backward_tokens import hopper_backward_tokens_kernel

            launch(
                hopper_backward_tokens_kernel, weak,
                q, k, v, f, splits, end, states_k, states_v, ds_k, ds_v, start, cu_seqlens, lse, delta, do, p, dz, x,
                dk, dv, df, *sizes, M, f.shape[3], K, V, start is not None, packed, num_warps=4,
            )  # fmt: skip
        elif hopper:
            from tokenmix_nha.ops.slot_window.hopper.backward_gates import hopper_backward_gates_kernel
            from tokenmix_nha.ops.slot_window.hopper.backward_keys import hopper_backward_keys_kernel

            launch(
                hopper_backward_keys_kernel, weak,
                q, k, v, f, q_slots, splits, end, ds_k, ds_v, start, cu_seqlens, lse, delta, do, p, dz, dk, dk_slots,
                dv, *sizes, M, f.shape[3], K, V, group, own, start is not None, packed, num_warps=4,
            )  # fmt: skip
            launch(
                hopper_backward_gates_kernel, weak,
                q_slots if own else q, k_slots if own else k, v, f, splits, end, states_k, states_v, ds_k, ds_v, start,
                cu_seqlens, do, p, dz, x, df, *sizes[1:], M, f.shape[3], K, V, group, start is not None, packed,
                num_warps=4,
            )  # fmt: skip
        for strong in (True,) if hopper else (False, True):
            heads = tuning.strong_heads(y.key_chunks * y.rows, y.heads) if strong else 1
            grid = y.key_chunks * y.rows, cdiv(y.heads, heads)
            options = dict(STRONG=strong, HEADS=heads, num_warps=t.num_warps, num_stages=t.num_stages)
            launch(
                slot_window_backward_values_kernel, grid,
                q, k, f, splits, gates.weight, gates.column, ds_v, start, cu_seqlens, lse, do, p, dv, *sizes,
                **shared, BM=t.BM, BN=t.BN, **options,
            )  # fmt: skip
            launch(
                slot_window_backward_keys_kernel, grid,
                q, k, v, f, q_slots, splits, gates.weight, gates.column, ds_k, start, cu_seqlens, lse, delta, do, dz,
                dk, dk_slots, *sizes, **y.constants, BM=t.BM, BN=t.BN, **options,
            )  # fmt: skip
            launch(
                slot_window_backward_gates_kernel, (*grid, cdiv(M, t.BM)),
                q_slots if own else q, k_slots if own else k, v, f, splits, gates.row, gates.column, end, states_k,
                states_v, ds_k, ds_v, start, cu_seqlens, do, p, dz, x, df, *sizes[1:], **shared, BM=t.BM,
                **options,
            )  # fmt: skip
    return gradients


def _empty_gradients(
    q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, lse, end, splits, states_k, states_v, do, dfinal_k, dfinal_v,
    before, window, scale, impl, initial,
):  # fmt: skip
    empty = torch.empty_like
    # an op returns tensors only: an absent argument has an empty gradient
    none = q.new_empty(0)
    dq_slots, dk_slots = (none, q.new_empty(0)) if q_slots is None else (empty(q_slots), empty(k_slots))
    slots = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, k.shape[2], f.shape[3]
    initial = (q.new_empty(*slots, x.shape[3], dtype=torch.float32) for x in (k, v))
    return empty(q), empty(k), empty(v), empty(f), dq_slots, dk_slots, *initial


@recorded_op("tokenmix_nha::slot_window_attention_backward", mutates_args=())
def slot_window_attention_backward_op(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, q_slots: Tensor | None, k_slots: Tensor | None, start: Tensor | None,
    cu_seqlens: Tensor | None, o: Tensor, lse: Tensor, end: Tensor, splits: Tensor, states_k: Tensor, states_v: Tensor,
    do: Tensor | None, dfinal_k: Tensor | None, dfinal_v: Tensor | None, before: int, window: int, scale: float,
    impl: str | None, initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, df, dq_slots, dk_slots and the gradients of the initial slots (of use where `initial`)."""
    return _run_backward(
        q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, lse, end, splits, states_k, states_v, do, dfinal_k,
        dfinal_v, before, window, scale, impl, initial,
    )  # fmt: skip


slot_window_attention_backward_op.register_fake(_empty_gradients)


def _results_alone(*inputs) -> tuple[Tensor, ...]:
    """`_run` where nobody asks for gradients."""
    return _run(*inputs)[:3]


def _keep(q, k, v, f, q_slots, k_slots, slots_k, slots_v, start, cu_seqlens, before, window, scale, impl):
    """`_run`, with one buffer of all that the backward pass needs."""
    layouts = _kept_layouts(q, _layout(q, k, v, f, k_slots, start, cu_seqlens, before, window))
    kept = q.new_empty(room_for(layouts), dtype=torch.uint8)
    inputs = q, k, v, f, q_slots, k_slots, slots_k, slots_v, start, cu_seqlens, before, window, scale, impl
    return *_run(*inputs, parts_of(kept, layouts))[:3], kept


def _parts(q, k, v, f, k_slots, start, cu_seqlens, kept, before, window) -> list[Tensor]:
    """The tensors that `_keep` kept, each of its own."""
    return parts_of(kept, _kept_layouts(q, _layout(q, k, v, f, k_slots, start, cu_seqlens, before, window)))


def _asked_for(
    q,
    k,
    v,
    f,
    q_slots,
    k_slots,
    start,
    cu_seqlens,
    o,
    kept,
    do,
    dfinal_k,
    dfinal_v,
    before,
    window,
    scale,
    impl,
    initial,
) -> tuple[Tensor | None, ...]:
    """`_run_backward` after `_keep`, with None for gradients that nobody gets: fewer buffers to make."""
    parts = _parts(q, k, v, f, k_slots, start, cu_seqlens, kept, before, window)
    *grads, dq_slots, dk_slots, dinitial_k, dinitial_v = _run_backward(
        q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, *parts, do, dfinal_k, dfinal_v, before, window, scale,
        impl, initial,
    )  # fmt: skip
    slots = (None, None) if q_slots is None else (dq_slots, dk_slots)
    return *grads, *slots, *((dinitial_k, dinitial_v) if initial else (None, None))


_replayed_backward = retried(Replayed(_asked_for))


def _save(ctx, inputs, output) -> None:
    q, k, v, f, q_slots, k_slots, slots_k, _, start, cu_seqlens, *ctx.options = inputs
    o, _, _, *saved = output
    ctx.initial = slots_k is not None
    # else torch would fill gradients of all outputs with zeros, those of the chunks' slots included
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, *saved)


def _gradients(ctx, do, dfinal_k, dfinal_v, *_):
    q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, *kept = ctx.saved_tensors
    run = slot_window_attention_backward_op
    # by `_keep`, not by the op
    if len(kept) == 1:
        if is_plain(q):
            run = _replayed_backward
        else:
            kept = _parts(q, k, v, f, k_slots, start, cu_seqlens, *kept, *ctx.options[:2])
    tensors = q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, *kept
    *grads, dinitial_k, dinitial_v = run(*tensors, do, dfinal_k, dfinal_v, *ctx.options, ctx.initial)
    slots = grads[4:] if q_slots is not None else (None, None)
    initial = (dinitial_k, dinitial_v) if ctx.initial else (None, None)
    return *grads[:4], *slots, *initial, None, None, None, None, None, None


# o and the final slots, by the kernels; keys are the window before the queries and theirs
slot_window_attention_kernels = differentiable(
    slot_window_attention_op, _results_alone, _save, _gradients, outputs=3, keep=_keep
)
