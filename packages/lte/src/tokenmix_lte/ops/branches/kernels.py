"""Kernels of the gated sum of the branches' outputs, of its gradients, and a differentiable function for eager mode.

A row is one head of one token; a program computes a tile of rows."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import Replayed, RowCall, cached_launch, gdc_launch_and_wait
from tokenmix_core.ops import eager_function, rows_of

# number of elements in a tile
_TILE_ELEMENTS = 2048
# a tile's row indices (int64), its channels, and the masks of its valid rows and elements
Rows = namedtuple("Rows", "o_r o_v m_r m_x")


@triton.jit
def tile_rows(R, V, BR: tl.constexpr, BV: tl.constexpr):
    """Return the `Rows` of this program's tile of a matrix `[R, V]`."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    return Rows(o_r, o_v, o_r < R, (o_r < R)[:, None] & (o_v < V)[None, :])


@triton.jit
def load_rows(x, stride, rows):
    """Load a tile of x in float32; masked elements are 0."""
    return tl.load(x + rows.o_r[:, None] * stride + rows.o_v[None, :], mask=rows.m_x, other=0.0).to(tl.float32)


@triton.jit
def load_gate(gates, stride, i: tl.constexpr, rows):
    """Load the gates of branch i, `[BR, 1]`, in float32."""
    return tl.load(gates + rows.o_r * stride + i, mask=rows.m_r, other=0.0).to(tl.float32)[:, None]


@cached_launch
@triton.jit(do_not_specialize=["R"])
def gated_sum_kernel(
    compressed, selected, window, gates, o, s_c, s_s, s_w, s_g, R, V, BR: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute BR rows of the gated sum o."""
    gdc_launch_and_wait(PDL)
    rows = tile_rows(R, V, BR, BV)
    b_o = load_gate(gates, s_g, 0, rows) * load_rows(compressed, s_c, rows)
    b_o += load_gate(gates, s_g, 1, rows) * load_rows(selected, s_s, rows)
    b_o += load_gate(gates, s_g, 2, rows) * load_rows(window, s_w, rows)
    tl.store(o + rows.o_r[:, None] * V + rows.o_v[None, :], b_o.to(o.dtype.element_ty), mask=rows.m_x)


@triton.jit
def branch_gradients(x, dx, gates, dgates, b_do, s_x, s_g, V, i: tl.constexpr, rows):
    """Store the gradients of branch i and of its gates."""
    b_da = tl.sum(b_do * load_rows(x, s_x, rows), 1)
    b_dx = load_gate(gates, s_g, i, rows) * b_do
    tl.store(dx + rows.o_r[:, None] * V + rows.o_v[None, :], b_dx.to(dx.dtype.element_ty), mask=rows.m_x)
    tl.store(dgates + rows.o_r * 3 + i, b_da.to(dgates.dtype.element_ty), mask=rows.m_r)


@cached_launch
@triton.jit(do_not_specialize=["R"])
def gated_sum_backward_kernel(
    compressed, selected, window, gates, do, dcompressed, dselected, dwindow, dgates, s_c, s_s, s_w, s_g, s_d, R, V,
    BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BR rows of all branches, and of their gates."""
    rows = tile_rows(R, V, BR, BV)
    b_do = load_rows(do, s_d, rows)
    branch_gradients(compressed, dcompressed, gates, dgates, b_do, s_c, s_g, V, 0, rows)
    branch_gradients(selected, dselected, gates, dgates, b_do, s_s, s_g, V, 1, rows)
    branch_gradients(window, dwindow, gates, dgates, b_do, s_w, s_g, V, 2, rows)


def _run(compressed: Tensor, selected: Tensor, window: Tensor, gates: Tensor) -> Tensor:
    """Return the gated sum of branches `[*, V]` by gates `[*, 3]`."""
    o = compressed.new_empty(compressed.shape)
    _launch(gated_sum_kernel, compressed, selected, window, gates, o=o)
    return o


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(compressed, selected, window, gates, do) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the three branches and of the gates."""
    dcompressed, dselected, dwindow, dgates = (x.new_empty(x.shape) for x in (compressed, selected, window, gates))
    do = rows_of(do)
    _launch(
        gated_sum_backward_kernel, compressed, selected, window, gates, do=do.x, dcompressed=dcompressed,
        dselected=dselected, dwindow=dwindow, dgates=dgates, s_d=do.stride,
    )  # fmt: skip
    return dcompressed, dselected, dwindow, dgates


def _launch(kernel, *branches_and_gates: Tensor, **others) -> None:
    compressed, selected, window, gates = map(rows_of, branches_and_gates)
    _, R, V, _ = compressed
    BV = next_power_of_2(V)
    BR = max(1, _TILE_ELEMENTS // BV)
    kernel[(cdiv(R, BR),)](
        compressed=compressed.x, selected=selected.x, window=window.x, gates=gates.x, s_c=compressed.stride,
        s_s=selected.stride, s_w=window.stride, s_g=gates.stride, R=R, V=V, **others, BR=BR, BV=BV,
        num_warps=4,
    )  # fmt: skip


_replayed = Replayed(_backward)

gated_sum_triton = eager_function(
    "gated_sum", _run, _save, lambda ctx, do: _replayed(*ctx.saved_tensors, do), RowCall("R", "BR")
)
