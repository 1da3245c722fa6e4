"""Test attention for Hopper on a CPU, by the Gluon emulator, against the reference."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.ops.softmax_attention import attention_reference
from tokenmix_core.ops.softmax_attention.bias_columns import BIAS_COLUMNS
from tokenmix_core.ops.softmax_attention.reference import attention_reference_backward
from tokenmix_core.ops.softmax_attention.types import Mask
from tokenmix_core.testing import gluon_emulator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

CAUSAL = Mask(True, None, 0)
CASES = {
    "causal": dict(mask=CAUSAL),
    "bidirectional, ragged": dict(TQ=33, TK=70, mask=Mask(False, None, 0)),
    "window, through the log-sum-exp": dict(mask=Mask(True, 20, 0), through_lse=True),
    "window and sinks, grouped heads": dict(B=2, HQ=4, H=2, mask=Mask(True, 10, 37), through_lse=True),
    "fewer queries": dict(TQ=7, TK=70, mask=Mask(True, 30, 5)),
    "fewer keys": dict(TQ=70, TK=61, mask=CAUSAL, through_lse=True),
    "chosen queries, grouped heads": dict(B=2, HQ=4, H=2, mask=CAUSAL, chosen=0.04),
    "chosen queries, fewer than keys": dict(TQ=50, TK=70, mask=CAUSAL, chosen=0.1),
    "chosen queries, packed": dict(mask=CAUSAL, cu_seqlens=[0, 1, 1, 16, 40, 41, 70], chosen=0.1),
    "no query chosen": dict(mask=CAUSAL, chosen=0.0),
    "packed": dict(mask=CAUSAL, cu_seqlens=[0, 1, 1, 16, 40, 41, 70]),
    "packed, window and sinks": dict(HQ=4, H=2, mask=Mask(True, 5, 3), cu_seqlens=[0, 50, 50, 66, 70]),
}


@pytest.fixture(scope="module")
def hopper():
    """Return the modules of the backward and of the forward kernels on the emulator, with tiles of 16."""
    package = "ops.softmax_attention.hopper"
    shared = (
        "kernels.gluon.hopper",
        "kernels.gluon.online_softmax",
        f"{package}.bias_columns",
        f"{package}.query_tile",
        f"{package}.backward_tiles",
    )
    *_, backward, forward = gluon_emulator.load("tokenmix_core", *shared, f"{package}.backward", f"{package}.forward")
    for module in (backward, forward):
        module.TILE = 16
    return backward, forward


@pytest.mark.parametrize("case", CASES)
def test_gradients_answer_to_the_reference(hopper, case):
    generator = torch.Generator().manual_seed(0)
    options = dict(CASES[case])
    mask, cu, through_lse = options.pop("mask"), options.pop("cu_seqlens", None), options.pop("through_lse", False)
    chosen = options.pop("chosen", None)
    B, HQ, H, TQ = (options.get(name, size) for name, size in (("B", 1), ("HQ", 2), ("H", 2), ("TQ", 70)))
    TK = options.get("TK", TQ)
    shapes = (B, TQ, HQ, 64), (B, TK, H, 64), (B, TK, H, 64), (B, TQ, HQ, 64)
    q, k, v, do = (torch.randn(shape, generator=generator) for shape in shapes)
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    form = dict(scale=0.125, cu_seqlens=cu, **mask._asdict())
    o, lse = attention_reference(q, k, v, **form)
    dlse = torch.randn(lse.shape, generator=generator).masked_fill(lse.isneginf(), 0) if through_lse else None

    selected = None if chosen is None else torch.rand(B, TQ, generator=generator) < chosen
    wanted = torch.ones(B, TQ, 1, dtype=torch.bool) if selected is None else selected[..., None]

    expected = attention_reference_backward(q, k, v, o, do * wanted[..., None], dlse, **form)
    # the forward pass writes these values for queries that are not selected
    o, lse = o * wanted[..., None], lse.masked_fill(~wanted, float("inf"))
    grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    lse = lse.transpose(1, 2).contiguous()
    dlse = None if dlse is None else dlse.transpose(1, 2).contiguous()
    delta = torch.full_like(lse, float("nan"))
    bias = delta.new_full((*delta.shape, BIAS_COLUMNS.value), float("nan"), dtype=torch.bfloat16)
    backward, _ = hopper
    given = dict(q=q, k=k, v=v, do=do, bias=bias, cu_seqlens=cu, mask=mask, scale=0.125, selected=selected)
    queries = dict(**given, o=o.contiguous(), lse=lse, dlse=dlse, delta=delta)
    backward.backward_queries(**queries, dq=grads[0])
    backward.backward_keys(**given, dk=grads[1], dv=grads[2])
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-5)
    # compute delta, which the portable kernel of keys reads
    alone, delta_alone = torch.full_like(q, float("nan")), torch.full_like(delta, float("nan"))
    backward.backward_queries(**queries | dict(bias=None, delta=delta_alone), dq=alone)
    assert torch.equal(alone, grads[0])
    assert torch.equal(delta_alone.nan_to_num(), delta.nan_to_num())
    if selected is not None:
        # tiles without a selected query are not written
        left = torch.full_like(q, float("nan"))
        backward.backward_queries(**queries, dq=left, fill=False)
        written = ~left.isnan()
        assert written[selected].all()
        assert torch.equal(left[written], grads[0][written])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if "chosen" not in CASES[case]])
def test_outputs_answer_to_the_reference(hopper, override, case, count):
    # pipeline stages
    override(hopper[1].tuning, hopper_forward=lambda head_size, programs: (count, 128))
    generator = torch.Generator().manual_seed(0)
    B, HQ, H, TQ = (CASES[case].get(name, size) for name, size in (("B", 1), ("HQ", 2), ("H", 2), ("TQ", 70)))
    TK = CASES[case].get("TK", TQ)
    q, k, v = (torch.randn(s, generator=generator) for s in ((B, TQ, HQ, 64), (B, TK, H, 64), (B, TK, H, 64)))
    mask = CASES[case]["mask"]
    cu = CASES[case].get("cu_seqlens")
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    exact = attention_reference(q, k, v, scale=0.125, cu_seqlens=cu, **mask._asdict())
    o, lse = torch.full_like(q, float("nan")), torch.full((B, HQ, TQ), float("nan"))
    hopper[1].forward(q, k, v, o, lse, cu, mask, 0.125)
    for got, expected in zip((o, lse.transpose(1, 2)), exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# scores far above those of a query's own tile, whose maxima are subtracted from all
FAR_ABOVE = {"causal": CAUSAL, "bidirectional": Mask(False, None, 0), "window and sinks": Mask(True, 40, 5)}


def far_above(mask: Mask, T: int, D: int):
    """Queries, keys and values, outputs to be written, and what they should be; first keys give scores of hundreds."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, D, generator=generator) for _ in range(3))
    k[:, :5] *= 50
    # NaN in a query stays in its row
    q[:, T // 2, 0, 0] = float("nan")
    exact = attention_reference(q, k, v, scale=0.25, **mask._asdict())
    assert not torch.allclose(exact.lse[:, :6], exact.lse[:, -6:], atol=88)
    return (q, k, v), (torch.zeros_like(q), torch.zeros(1, 2, T)), (exact.o, exact.lse.transpose(1, 2))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mask", FAR_ABOVE.values(), ids=FAR_ABOVE)
def test_scores_far_above_those_of_the_own_tile_are_met_once_more(hopper, override, mask, count):
    override(hopper[1].tuning, hopper_forward=lambda head_size, programs: (count, 128))
    inputs, outputs, exact = far_above(mask, 70, 64)
    hopper[1].forward(*inputs, *outputs, None, mask, 0.25)
    torch.testing.assert_close(outputs, exact, rtol=1e-4, atol=1e-4, equal_nan=True)


# calls of the warp-specialised kernel, whose CTAs have 128 rows
LONG = {
    "causal": dict(TQ=300, mask=CAUSAL),
    "bidirectional, ragged": dict(TQ=129, TK=333, mask=Mask(False, None, 0)),
    "window, grouped heads": dict(TQ=500, HQ=4, H=2, mask=Mask(True, 100, 0)),
    "narrow window": dict(TQ=400, HQ=1, H=1, mask=Mask(True, 5, 0)),
    "fewer queries": dict(TQ=7, TK=400, mask=Mask(True, 300, 0)),
    "fewer keys": dict(TQ=400, TK=270, mask=CAUSAL),
    "far fewer keys": dict(B=2, TQ=400, TK=100, HQ=1, H=1, mask=CAUSAL),
    "packed": dict(mask=CAUSAL, HQ=2, H=1, cu_seqlens=[0, 1, 1, 64, 300, 301, 500]),
    "packed window": dict(TQ=500, mask=Mask(True, 70, 0), cu_seqlens=[0, 250, 250, 383, 500]),
    "window and sinks": dict(TQ=500, HQ=2, H=1, mask=Mask(True, 100, 37)),
}


@pytest.fixture(scope="module")
def warp_specialised():
    """Return the module of the warp-specialised forward kernel on the emulator."""
    return gluon_emulator.load("tokenmix_core", "kernels.gluon.hopper", "ops.softmax_attention.hopper.forward_ws")[1]


@pytest.mark.parametrize("mask", FAR_ABOVE.values(), ids=FAR_ABOVE)
def test_warp_specialised_forward_runs_again_if_scores_are_far_above_those_of_the_own_tile(warp_specialised, mask):
    inputs, outputs, exact = far_above(mask, 400, 128)
    warp_specialised.forward(*inputs, *outputs, None, mask, 0.25)
    torch.testing.assert_close(outputs, exact, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("case", LONG)
def test_warp_specialised_forward_matches_the_reference(warp_specialised, case):
    options = dict(LONG[case])
    mask, cu = options.pop("mask"), options.pop("cu_seqlens", None)
    B, HQ, H = (options.get(name, size) for name, size in (("B", 1), ("HQ", 2), ("H", 2)))
    TQ = options.get("TQ", cu and cu[-1])
    TK = options.get("TK", TQ)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=generator) for s in ((B, TQ, HQ, 128), (B, TK, H, 128), (B, TK, H, 128)))
    cu = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    exact = attention_reference(q, k, v, scale=0.1, cu_seqlens=cu, **mask._asdict())

    o, lse = torch.full_like(q, float("nan")), torch.full((B, HQ, TQ), float("nan"))
    warp_specialised.forward(q, k, v, o, lse, cu, mask, 0.1)
    for got, expected in zip((o, lse.transpose(1, 2)), exact, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
