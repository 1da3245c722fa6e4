"""Attention over retained keys for Hopper on a CPU, run by the Gluon emulator, against the reference in float64."""

from __future__ import annotations

import sys
from collections import defaultdict

import pytest
import torch

from tokenmix_core.ops.softmax_attention import tuning
from tokenmix_core.ops.sparse_attention import (
    autograd,
    backward_queries,
    forward,
    kept_attention_reference,
)
from tokenmix_core.testing import gluon_emulator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

TILE = 16
CASES = {
    "tokens": dict(B=2, HQ=4, H=2, HM=1, window=10, through_lse=True),
    "all kept": dict(kept=1.0, window=13),
    "none kept": dict(kept=0.0, window=13),
    "one head keeps everything": dict(HQ=2, H=2, HM=2, kept="one head", window=10),
    "each its own unit": dict(kept=0.1),
    "fewer queries": dict(TQ=23, TK=70, window=20, through_lse=True),
    "fewer keys": dict(TQ=70, TK=61, window=9),
    "wide values": dict(V=128, window=10),
    "wide keys": dict(K=128, window=10, kept=0.5),
    "chunks": dict(T=300, HQ=2, H=2, HM=1, unit=64, kept=0.5, V=128, through_lse=True),
    "chunks of 128, a window": dict(T=300, unit=128, kept=0.7, window=40),
    "packed": dict(HQ=2, H=1, window=5, boundaries=[0, 1, 1, 17, 50, 51, 70], through_lse=True),
    "packed chunks": dict(T=200, unit=64, kept=0.6, boundaries=[0, 1, 1, 66, 200]),
    "marks of values": dict(B=2, HQ=4, H=2, HM=1, window=10, through_lse=True, values=True),
    "marks of wide values, packed chunks": dict(
        T=200, HQ=2, H=2, HM=1, unit=64, V=128, boundaries=[0, 1, 1, 66, 200], values=True
    ),
    # scores of the first keys are far above those of a query's own tile, whose maxima are subtracted from all
    "great scores": dict(HQ=2, H=1, window=10, kept=0.5, great=25),
}  # fmt: skip


@pytest.fixture(scope="module")
def hopper():
    """Return the modules of the kernels on the emulator, with tiles of 16."""
    folder, attention = "ops.sparse_attention.hopper", "ops.softmax_attention.hopper"
    tiles = f"{attention}.bias_columns", f"{attention}.query_tile", f"{attention}.backward_tiles", f"{folder}.tiles"
    shared = "kernels.gluon.hopper", "kernels.gluon.online_softmax", *tiles
    names = "forward", "backward_queries", "backward_keys"
    *modules, package = gluon_emulator.load("tokenmix_core", *shared, *(f"{folder}.{name}" for name in names), folder)
    package.TILE = modules[-2].TILE = TILE
    return modules[-3:]


@pytest.fixture
def by_gluon(hopper, monkeypatch):
    """Lets launchers take these kernels, and sums be made in parts."""
    for module, name in zip(hopper, ("forward", "backward_queries", "backward_keys"), strict=True):
        monkeypatch.setitem(sys.modules, f"tokenmix_core.ops.sparse_attention.hopper.{name}", module)
    monkeypatch.setattr("tokenmix_core.ops.sparse_attention.hopper.TILE", TILE)
    for module in (forward, backward_queries):
        monkeypatch.setattr(module, "takes_gluon", lambda *call: True)
    return hopper


# queries that a forward program takes, and how many programs the work of keys is cut for
SHAPES = {case: [(TILE, 3)] for case in CASES}
for case in ("tokens", "fewer queries", "packed", "marks of values"):
    SHAPES[case].append((2 * TILE, 1))


@pytest.mark.parametrize(
    ("case", "rows", "programs"), [(case, *shape) for case, shapes in SHAPES.items() for shape in shapes]
)
def test_values_and_gradients_answer_to_float64(by_gluon, override, case, rows, programs):
    override(tuning, work_tiles=lambda *call: programs)
    # in the module that the emulator has imported
    tile = tuning.AttentionTile(rows, TILE, 4, 1)
    override(by_gluon[0].tuning, HOPPER_FORWARD=defaultdict(lambda: tile))
    case = CASES[case]
    case = (
        dict(B=1, HQ=1, H=1, HM=1, K=64, V=64, unit=1, kept=0.3, window=None, boundaries=None, through_lse=False) | case
    )
    B, HQ, H, HM, K, V, unit = (case[name] for name in ("B", "HQ", "H", "HM", "K", "V", "unit"))
    TQ = case.get("TQ", case.get("T", 70))
    TK = case.get("TK", TQ)
    generator = torch.Generator().manual_seed(0)
    shapes = (B, TQ, HQ, K), (B, TK, H, K), (B, TK, H, V)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    k[:, :9] *= case.get("great", 1)
    boundaries = case["boundaries"]
    U = -(-TK // unit) if boundaries is None or unit == 1 else TK // unit + len(boundaries) - 1
    if case["kept"] == "one head":
        keep = torch.zeros(B, U, HM)
        keep[..., -1] = 1
    else:
        keep = (torch.rand(B, U, HM, generator=generator) < case["kept"]).float()
    cu = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32)
    keep_gradient = "values" if case.get("values") else "exponentials"
    form = dict(unit=unit, window=case["window"], scale=0.125, keep_gradient=keep_gradient)

    exact = [x.double().requires_grad_() for x in (q, k, v, keep)]
    out = kept_attention_reference(*exact, cu_seqlens=cu, **form)
    blind = out.lse.isneginf()
    do = torch.randn(out.o.shape, generator=generator).masked_fill(blind[..., None], 0)
    dlse = torch.randn(out.lse.shape, generator=generator).masked_fill(blind, 0) if case["through_lse"] else None
    up = do.double(), torch.zeros_like(out.lse) if dlse is None else dlse.double()
    wanted = torch.autograd.grad((out.o, out.lse.masked_fill(blind, 0)), exact, up)

    rest = (*form.values(), "triton")
    given = (q, k, v, keep, None, cu, *rest)
    o, lse, *lists = autograd._forward(*given)
    torch.testing.assert_close(o, out.o.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.transpose(1, 2), out.lse.float(), rtol=1e-4, atol=1e-5)
    dlse = None if dlse is None else dlse.transpose(1, 2).contiguous()
    grads = autograd._backward(*given, o, lse, *lists, do, dlse, True)
    for got, x in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, x.float(), rtol=1e-4, atol=3e-5)
