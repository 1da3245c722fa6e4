"""What the steps of a pass hand to one another, by the names that kernels and README.md give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.common import aligned
from tokenmix_nha.ops.slot_window import tuning

_Layouts = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Inputs(NamedTuple):
    """What the operation is given.

    Attributes:
        q, q_slots: `[B, T, HQ, K]`.
        k, k_slots, v, f: `[B, before + T, H, K, V or M]`; of each sequence the carried window comes first.
        slots_k, slots_v: the slots that it begins with, `[N, H, M, K or V]`, float32; None is zero.
        start: each sequence's oldest key that exists, `[N]`.
        cu_seqlens: borders of the sequences' queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    q_slots: Tensor | None
    k_slots: Tensor | None
    slots_k: Tensor | None
    slots_v: Tensor | None
    start: Tensor | None
    cu_seqlens: Tensor | None
    before: int
    window: int
    scale: float
    impl: str | None

    def aligned(self) -> Inputs:
        """The same as kernels read it."""
        return Inputs(*map(aligned, self[:8]), *self[8:])


class Layout(NamedTuple):
    """Sizes of a call, and how its sequences are cut up.

    Attributes:
        T, N, H, GROUP: queries of a row, sequences, heads of keys, and query heads of each.
        M, SLOTS, BM: slots of a tile in memory, those that exist, and those of a tile in registers of Triton's kernels
            that take all at once.
        BT: tokens of a chunk.
        factor: the dtype of the gates' factors.
        lead, extra: chunks of queries that come before any token enters the slots, and the tokens by which these
            overhang.
        rows: of chunks: one for all of a packed batch.
        query_chunks, key_chunks, entries: of a row, in README.md's terms.
    """

    T: int
    N: int
    H: int
    GROUP: int
    M: int
    SLOTS: int
    BM: int
    K: int
    V: int
    BT: int
    HAS_START: bool
    PACKED: bool
    DOT: str
    factor: torch.dtype
    before: int
    window: int
    lead: int
    extra: int
    rows: int
    query_chunks: int
    key_chunks: int
    entries: int

    @property
    def of_queries(self) -> dict[str, int]:
        """What kernels whose programs take a chunk of queries are told of sizes."""
        return {
            **{"T": self.T, "N": self.N, "H": self.H, "before": self.before, "window": self.window},
            **{"chunks": self.query_chunks, "entries": self.entries, "extra": self.extra, "lead": self.lead},
        }

    @property
    def of_keys(self) -> dict[str, int]:
        """The same for chunks of keys."""
        return {
            **{"T": self.T, "N": self.N, "H": self.H, "before": self.before, "window": self.window},
            **{"chunks": self.key_chunks, "entries": self.entries},
        }

    @property
    def tile(self) -> dict[str, int | bool]:
        """What all kernels whose programs take a chunk are compiled for."""
        return {
            **{"M": self.M, "SLOTS": self.SLOTS, "K": self.K, "V": self.V},
            **{"HAS_START": self.HAS_START, "PACKED": self.PACKED},
        }

    @property
    def portable(self) -> dict:
        """The same of those in Triton."""
        import triton.language as tl

        FACTOR = tl.bfloat16 if self.factor == torch.bfloat16 else tl.float32
        return {**self.tile, "BT": self.BT, "GROUP": self.GROUP, "FACTOR": FACTOR, "DOT": self.DOT}


class Results(NamedTuple):
    """o `[B, T, HQ, V]` and the slots after each sequence's last token."""

    o: Tensor
    final_k: Tensor
    final_v: Tensor


class Kept(NamedTuple):
    """What a forward pass finds and the backward pass needs.

    Attributes:
        lse: base-2 log-sum-exp `[B, T, HQ]`.
        end: log2 decay of each chunk, `[entries, H, M]`.
        splits: how often each chunk is halved for its factors to be within bounds, `[entries, H]`; 0 where it is weak.
        states_k, states_v: slots before each chunk, `[entries, H, K or V, M]`.
    """

    lse: Tensor
    end: Tensor
    splits: Tensor
    states_k: Tensor
    states_v: Tensor


class Gates(NamedTuple):
    """The cumulative gates of chunks, `[entries, H, BT, M]`.

    Attributes:
        weight: of each token in the slots at the chunk's end.
        row, column: factors of a token's weight in the slots that a later one sees.
    """

    weight: Tensor | None
    row: Tensor | None
    column: Tensor | None


class Softmax(NamedTuple):
    """What the queries' softmax says of the slots, for the gradients of what made these.

    Attributes:
        p, dz, x: by slot the probability, the scaled gradient of the logit and ⟨dS, S⟩, `[B, T, HQ, M]`.
        delta: do · o, `[B, T, HQ]`.
    """

    p: Tensor
    dz: Tensor
    x: Tensor
    delta: Tensor


class SlotGradients(NamedTuple):
    """Gradients of the slots after each chunk, `[entries, H, K or V, M]`."""

    ds_k: Tensor
    ds_v: Tensor


class Gradients(NamedTuple):
    """Gradients of the tensors of `Inputs`, in their order; None for what was not given."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    df: Tensor
    dq_slots: Tensor | None
    dk_slots: Tensor | None
    dinitial_k: Tensor | None
    dinitial_v: Tensor | None


class Backward(NamedTuple):
    """What the steps of a backward pass have in common.

    Attributes:
        x, y, kept: the call, and what its forward pass kept.
        o, do, dfinal_k, dfinal_v: outputs, and gradients of all results; None is zero.
        grads: room for all gradients.
    """

    x: Inputs
    y: Layout
    kept: Kept
    o: Tensor
    do: Tensor
    dfinal_k: Tensor | None
    dfinal_v: Tensor | None
    grads: Gradients


def layout(x: Inputs) -> Layout:
    """How a call is cut up."""
    batch, T, heads_q, K = x.q.shape
    keys, H, SLOTS = x.f.shape[1:]
    GROUP, packed = heads_q // H, x.cu_seqlens is not None
    BT = tuning.chunk_size(x.q.dtype)
    lead = max(cdiv(x.window - x.before, BT), 0)
    extra = lead * BT - (x.window - x.before)
    # not its length, which traced graphs would take for a constant
    N = x.cu_seqlens.shape[0] - 1 if x.cu_seqlens is not None else batch
    if packed:
        query_chunks = (T + N * extra) // BT + N
        key_chunks = keys // BT + N
        entries = keys // BT + 2 * N
    else:
        query_chunks = cdiv(T + extra, BT)
        key_chunks = cdiv(keys, BT)
        entries = cdiv(max(keys - x.window, 0), BT) + 1
    M = tuning.slot_tile(SLOTS, x.q.dtype, x.k_slots is not None, GROUP)
    return Layout(
        T=T, N=N, H=H, GROUP=GROUP, M=M, SLOTS=SLOTS, BM=tuning.whole_tile(M, x.q.dtype), K=K, V=x.v.shape[3], BT=BT,
        HAS_START=x.start is not None, PACKED=packed, DOT="ieee" if x.q.dtype == torch.float32 else "tf32",
        factor=torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32, before=x.before, window=x.window,
        lead=lead, extra=extra, rows=1 if packed else batch, query_chunks=query_chunks, key_chunks=key_chunks,
        entries=entries,
    )  # fmt: skip


def empty(x: Tensor, layouts: Sequence[tuple]) -> tuple[Tensor, ...]:
    """Room for tensors of these shapes and dtypes."""
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in layouts)


def empty_results(x: Inputs, y: Layout) -> Results:
    """Room for the results."""
    slots, wide = (y.N, y.H, y.SLOTS), torch.float32
    return Results(*empty(x.q, (((*x.q.shape[:3], y.V), x.q.dtype), ((*slots, y.K), wide), ((*slots, y.V), wide))))


def kept_layouts(x: Inputs, y: Layout) -> _Layouts:
    """Shapes and dtypes of `Kept`."""
    tiles = y.entries * y.rows, y.H
    small = (x.q.shape[:3], torch.float32), ((*tiles, y.M), torch.float32), (tiles, torch.int32)
    return *small, ((*tiles, y.K, y.M), x.q.dtype), ((*tiles, y.V, y.M), x.q.dtype)


def empty_softmax(x: Inputs, y: Layout) -> Softmax:
    """Room for what the slots' gradients need of the softmax."""
    shape = *x.q.shape[:3], y.M
    return Softmax(
        *empty(x.q, ((shape, y.factor), (shape, y.factor), (shape, torch.float32), (shape[:3], torch.float32)))
    )


def empty_gradients(x: Inputs, initial: bool) -> Gradients:
    """Room for all gradients, those of `initial` slots among them."""
    own = (None if t is None else torch.empty_like(t) for t in (x.q_slots, x.k_slots))
    slots = (None, None)
    if initial:
        N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        shape, wide = (N, *x.f.shape[2:]), torch.float32
        slots = empty(x.q, [((*shape, t.shape[3]), wide) for t in (x.k, x.v)])
    return Gradients(*map(torch.empty_like, x[:4]), *own, *slots)
