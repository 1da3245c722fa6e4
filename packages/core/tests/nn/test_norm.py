"""Test that norms compute their equations, in every dtype that models use."""

import pytest
import torch
import torch.nn.functional as F

from tokenmix_core.nn.norm import GatedRMSNorm, RMSNorm
from tokenmix_core.testing.closeness import assert_within, relative_error


def exact_norm(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 7, 24, dtype=torch.float64, generator=generator) for _ in range(2)]


def test_rms_norm_has_unit_mean_square_times_the_weight(data):
    norm = RMSNorm(24).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    assert relative_error(norm(data[0]), exact_norm(data[0], norm.weight)) < 1e-14


def test_gate_acts_after_or_before_the_norm(data):
    x, z = data
    after, before = GatedRMSNorm(24, gate="after").double(), GatedRMSNorm(24, gate="before").double()
    torch.nn.init.uniform_(after.weight, 0.5, 2.0)
    torch.nn.init.uniform_(before.weight, 0.5, 2.0)
    assert relative_error(after(x, z), exact_norm(x, after.weight) * F.silu(z)) < 1e-14
    assert relative_error(before(x, z), exact_norm(x * F.silu(z), before.weight)) < 1e-14


@pytest.mark.parametrize("gate", ["before", "after"])
def test_gate_of_none_equals_the_norm(data, gate):
    norm = GatedRMSNorm(24, gate=gate).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    assert relative_error(norm(data[0], None), exact_norm(data[0], norm.weight)) < 1e-14


def test_groups_are_normalised_separately(data):
    x, z = data
    norm = GatedRMSNorm(24, gate="before", groups=3).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    parts = [
        exact_norm(x[..., s] * F.silu(z[..., s]), norm.weight[s]) for s in (slice(0, 8), slice(8, 16), slice(16, 24))
    ]
    assert relative_error(norm(x, z), torch.cat(parts, -1)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["before", "after"])
def test_sums_are_float32(data, dtype, gate):
    # in float16 the sum of squares would overflow
    x, z = (200 * data[0]).to(dtype), data[1].to(dtype)
    norm = GatedRMSNorm(24, gate=gate)
    exact = norm.double()(x.double(), z.double())
    wide = x.float() * F.silu(z.float()) if gate == "before" else x.float()
    once = exact_norm(wide, 1.0) * (F.silu(z.float()) if gate == "after" else 1.0)
    # gate, multiplication and norm round once each, whereas the baseline rounds only its result
    assert_within("gated norm", norm.to(dtype)(x, z), exact, once.to(dtype), factor=3.0)


def test_gradients_equal_those_of_the_equation(data):
    x, z = (t[0, :2].clone().requires_grad_() for t in data)
    for norm in (GatedRMSNorm(24, gate="after"), GatedRMSNorm(24, gate="before", groups=2)):
        norm = norm.double()
        assert torch.autograd.gradcheck(lambda x, z, w, norm=norm: norm(x, z), (x, z, norm.weight))


@pytest.mark.parametrize("options", [{"gate": "beside"}, {"groups": 5}, {"groups": 0}])
def test_invalid_options_raise(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GatedRMSNorm(24, **options)
