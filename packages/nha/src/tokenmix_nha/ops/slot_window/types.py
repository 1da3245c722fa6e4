"""Types that the steps of the forward and backward pass exchange; fields are named as in the kernels and README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.ops import aligned
from tokenmix_nha.ops.slot_window import tuning

_Layouts = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Inputs(NamedTuple):
    """Arguments of the operation.

    Attributes:
        q, q_slots: `[B, T, HQ, K]`.
        k, k_slots, v, f: `[B, before + T, H, K, V or M]`; each sequence begins with `before` tokens of the carried
            window.
        slots_k, slots_v: the initial slots, `[N, H, M, K or V]`, float32; None stands for zero.
        start: index of each sequence's first valid key, `[N]`.
        cu_seqlens: boundaries of the sequences' queries.
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
        """Return the inputs with their tensors contiguous and aligned, as the kernels require."""
        return Inputs(*map(aligned, self[:8]), *self[8:])


class Pool(NamedTuple):
    """The pool of states that a prefill reads and overwrites: the fields of `SlotWindowState`, each `[S, ...]`.

    The elements of a slot are contiguous; slots may be any distance apart.

    Attributes:
        pool_k, pool_v: the slots of the layer, `[S, H, M, K or V]`.
        ring_k, ring_v, ring_f, ring_k_slots: ring buffers, `[S, W, H, K, V or M]`.
        length: int32 `[S, H]`.
        slots: the slot of each sequence in the pool, `[N]`; negative for a sequence without one.
        fresh: bool `[N]`, True for a sequence that starts from an empty state; None if none does.
    """

    pool_k: Tensor
    pool_v: Tensor
    ring_k: Tensor
    ring_v: Tensor
    ring_f: Tensor
    ring_k_slots: Tensor | None
    length: Tensor
    slots: Tensor
    fresh: Tensor | None


class PrefillInputs(NamedTuple):
    """Arguments of `slot_window_attention_prefill`; slots of the pool are overwritten."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    q_slots: Tensor | None
    k_slots: Tensor | None
    cu_seqlens: Tensor | None
    pool: Pool
    scale: float
    impl: str | None


def of_pool(pool: Pool | None, *names: str) -> dict:
    """Return the arguments of a kernel for a pool's tensors `names`, its lengths and slots; all are None without pool.

    An empty ring buffer, that of a window of 0, is None.
    """
    names = *names, "length"
    if pool is None:
        return dict.fromkeys((*names, *(f"stride_{name}" for name in names), "slots", "fresh"))
    tensors = {name: getattr(pool, name) for name in names}
    tensors = {name: None if x is None or not x[0].numel() else x for name, x in tensors.items()}
    strides = {f"stride_{name}": None if x is None else x.stride(0) for name, x in tensors.items()}
    return {**tensors, **strides, "slots": pool.slots, "fresh": pool.fresh}


class Layout(NamedTuple):
    """Sizes of a call and of its chunks.

    Attributes:
        T, N, H, GROUP: queries per row, number of sequences, of key heads, and of query heads per key head.
        M, SLOTS, BM: slots of a tile in memory; slots of the layer; slots of a register tile in those Triton kernels
            that hold all slots at once.
        BT: number of tokens in a chunk.
        factor: dtype of the gates' factors.
        lead: number of query chunks before the first token enters the slots.
        extra: number of tokens from the start of the first query chunk to the first query.
        rows: number of rows that are divided into chunks: B, or 1 for a packed batch.
        query_chunks, key_chunks, entries: number of query chunks, key chunks and chunk states per row.
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
        """Size arguments of the kernels with one program per query chunk."""
        return {
            **{"T": self.T, "N": self.N, "H": self.H, "before": self.before, "window": self.window},
            **{"chunks": self.query_chunks, "entries": self.entries, "extra": self.extra, "lead": self.lead},
        }

    @property
    def of_keys(self) -> dict[str, int]:
        """Size arguments of the kernels with one program per key chunk."""
        return {
            **{"T": self.T, "N": self.N, "H": self.H, "before": self.before, "window": self.window},
            **{"chunks": self.key_chunks, "entries": self.entries},
        }

    @property
    def tile(self) -> dict[str, int]:
        """Compile-time arguments of all kernels with one program per chunk."""
        return {"M": self.M, "SLOTS": self.SLOTS, "K": self.K, "V": self.V}

    @property
    def portable(self) -> dict:
        """Compile-time arguments of the Triton kernels with one program per chunk."""
        import triton.language as tl

        FACTOR = tl.bfloat16 if self.factor == torch.bfloat16 else tl.float32
        return {**self.tile, "BT": self.BT, "GROUP": self.GROUP, "FACTOR": FACTOR, "DOT": self.DOT}


class Results(NamedTuple):
    """o `[B, T, HQ, V]` and the slots after each sequence's last token."""

    o: Tensor
    final_k: Tensor
    final_v: Tensor


class Saved(NamedTuple):
    """Activations that the forward pass saves for the backward pass.

    Attributes:
        lse: base-2 log-sum-exp `[B, T, HQ]`.
        end: log2 decay over each chunk, `[entries, H, M]`.
        splits: number of halvings of each chunk after which no slot decays by more than 80 bits in a block, `[entries,
            H]`; 0 for weak chunks, which need none.
        states_k, states_v: slots before each chunk, `[entries, H, K or V, M]`.
    """

    lse: Tensor
    end: Tensor
    splits: Tensor
    states_k: Tensor
    states_v: Tensor


class Gates(NamedTuple):
    """Factors that the gates kernel computes for each chunk, `[entries, H, BT, M]`.

    Attributes:
        weight: weight of each token in the slots at the chunk's end.
        row, column: factors by query and by token; row · column is the token's weight in the slots that the query
            reads.
    """

    weight: Tensor | None
    row: Tensor | None
    column: Tensor | None


class Softmax(NamedTuple):
    """Results of the kernel of query gradients, which the kernels of key, value and log-gate gradients read.

    Attributes:
        p, dz: for each slot the probability, and the gradient of the unscaled logit; both times the query's row factor
            (`Gates`), `[B, T, HQ, M]`.
        x: the query's contribution to ⟨dS, S⟩ of each slot S, `[B, T, HQ, M]`.
        delta: δ = do · o, `[B, T, HQ]`.
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
    """Gradients of the tensors in `Inputs`, in the same order; None for an input that is None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    df: Tensor
    dq_slots: Tensor | None
    dk_slots: Tensor | None
    dinitial_k: Tensor | None
    dinitial_v: Tensor | None


class Backward(NamedTuple):
    """Arguments of all steps of the backward pass.

    Attributes:
        x, y, saved: inputs and sizes of the call, and the activations that its forward pass has saved.
        o, do: the output and its gradient.
        dfinal_k, dfinal_v: gradients of the final slots; None stands for zero.
        grads: buffers for the gradients of all inputs.
    """

    x: Inputs
    y: Layout
    saved: Saved
    o: Tensor
    do: Tensor
    dfinal_k: Tensor | None
    dfinal_v: Tensor | None
    grads: Gradients


def layout(x: Inputs, *, carried: bool = False) -> Layout:
    """Return the sizes of a call and of its chunks; `carried`: the keys in `x` do not include the carried windows."""
    batch, T, heads_q, K = x.q.shape
    keys, H, SLOTS = x.f.shape[1:]
    if carried:
        keys += x.before * (1 if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1)
    GROUP, packed = heads_q // H, x.cu_seqlens is not None
    BT = tuning.chunk_size(x.q.dtype)
    lead = max(cdiv(x.window - x.before, BT), 0)
    extra = lead * BT - (x.window - x.before)
    # read the shape, because torch.compile would replace len() by a constant
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
        DOT="ieee" if x.q.dtype == torch.float32 else "tf32",
        factor=torch.bfloat16 if x.q.dtype == torch.bfloat16 else torch.float32, before=x.before, window=x.window,
        lead=lead, extra=extra, rows=1 if packed else batch, query_chunks=query_chunks, key_chunks=key_chunks,
        entries=entries,
    )  # fmt: skip


def empty(x: Tensor, layouts: Sequence[tuple]) -> tuple[Tensor, ...]:
    """Allocate on x's device one tensor for each (shape, dtype) in `layouts`."""
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in layouts)


def empty_results(x: Inputs, y: Layout) -> Results:
    """Allocate o and the final slots."""
    slots, wide = (y.N, y.H, y.SLOTS), torch.float32
    return Results(*empty(x.q, (((*x.q.shape[:3], y.V), x.q.dtype), ((*slots, y.K), wide), ((*slots, y.V), wide))))


def saved_layouts(x: Inputs, y: Layout) -> _Layouts:
    """Return the shapes and dtypes of the fields of `Saved`."""
    tiles = y.entries * y.rows, y.H
    small = (x.q.shape[:3], torch.float32), ((*tiles, y.M), torch.float32), (tiles, torch.int32)
    return *small, ((*tiles, y.K, y.M), x.q.dtype), ((*tiles, y.V, y.M), x.q.dtype)


def empty_softmax(x: Inputs, y: Layout) -> Softmax:
    """Allocate the tensors of `Softmax`."""
    shape = *x.q.shape[:3], y.M
    return Softmax(
        *empty(x.q, ((shape, y.factor), (shape, y.factor), (shape, torch.float32), (shape[:3], torch.float32)))
    )


def empty_gradients(x: Inputs, initial: bool) -> Gradients:
    """Allocate the gradients of all inputs; those of the initial slots only if `initial`."""
    own = (None if t is None else torch.empty_like(t) for t in (x.q_slots, x.k_slots))
    slots = (None, None)
    if initial:
        N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        shape, wide = (N, *x.f.shape[2:]), torch.float32
        slots = empty(x.q, [((*shape, t.shape[3]), wide) for t in (x.k, x.v)])
    return Gradients(*map(torch.empty_like, x[:4]), *own, *slots)
