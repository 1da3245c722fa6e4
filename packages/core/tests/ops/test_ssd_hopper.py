"""SSD's gradients for Hopper on a CPU, run by the stand-in for Gluon, against float64."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from tokenmix_core import tuning
from tokenmix_core.ops import chunk_ssd
from tokenmix_core.ops.ssd import gradients
from tokenmix_core.testing import gluon
from tokenmix_core.testing.agreement import assert_agrees

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

CASES = {
    "ragged": (dict(B=2, T=70, G=2, HV=2), {}),
    "packed": (dict(B=1, T=130, G=1, HV=2, N=4), {"cu_seqlens": [0, 0, 1, 64, 130]}),
    "unequal head sizes": (dict(B=1, T=66, G=1, HV=4, K=128), {}),
    "more values than keys": (dict(B=1, T=66, G=1, HV=2, V=128), {}),
    "wide heads": (dict(B=1, T=66, G=1, HV=2, K=128, V=128), {}),
}


@pytest.fixture(scope="module")
def module():
    return gluon.load("tokenmix_core.ops.ssd", "hopper")[0]


def inputs(B, T, G, HV, K=64, V=64, N=None):
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator)
    x = {"q": randn(B, T, G, K) / K**0.5, "k": randn(B, T, G, K), "v": randn(B, T, HV, V)}
    x["g"] = -0.2 * torch.rand(B, T, HV, generator=generator)
    return x | ({"initial_state": randn(N, HV, K, V)} if N else {})


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_gradients_answer_to_the_reference(case, heads, module, monkeypatch):
    shape, options = CASES[case]
    if heads > 1 and (shape["G"] == shape["HV"] or shape.get("K") == shape.get("V") == 128):
        pytest.skip("heads are summed where they share a group and two states fit")
    original, ran = tuning.ssd, []

    def plan(*args):
        plan = original(*args)
        return plan._replace(gradients=plan.gradients._replace(hopper=tuning.SSDHopper(heads, 4)))

    def step(*args):
        ran.append(case)
        return module.hopper_gradients(*args)

    monkeypatch.setattr(tuning, "ssd", plan)
    monkeypatch.setitem(sys.modules, "tokenmix_core.ops.ssd.hopper", type(sys)("hopper"))
    sys.modules["tokenmix_core.ops.ssd.hopper"].hopper_gradients = step
    monkeypatch.setattr(gradients, "on_hopper", lambda device: True)
    if "cu_seqlens" in options:
        options = {"cu_seqlens": torch.tensor(options["cu_seqlens"], dtype=torch.int32)}
    ssd = partial(chunk_ssd, scale=0.7, **options)
    assert_agrees(partial(ssd, impl="triton"), partial(ssd, impl="reference"), inputs(**shape))
    assert ran
