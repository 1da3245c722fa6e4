"""Test one token's rotation with stores of keys and values: against the rotation, kernels against float64."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.ops import rotate, rotate_step
from tokenmix_core.testing.closeness import assert_within
from tokenmix_core.testing.layout_contract import differently_laid
from tokenmix_core.testing.operations import HALF

# by name; keys and values that are views of heads side by side, or of another order
CASES = {
    "heads of one size": dict(),
    "norms": dict(norm=True),
    "angles of each sequence": dict(rows=3),
    "values of another size": dict(V=20, norm=True),
    "heads before places": dict(head_major=True, rows=3),
    "no angles": dict(rows=0),
    "norms without angles": dict(rows=0, norm=True, V=20),
    "no values": dict(V=0, norm=True),
    "no places": dict(S=1),
    "neither": dict(V=0, S=1, rows=3),
}


def inputs(B=3, HQ=4, H=2, K=12, V=12, S=7, rows=1, norm=False, head_major=False, dtype=torch.float64, device="cpu"):
    """Return positional arguments in their order, with values that all dtypes can represent."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=rng).half().to(device, dtype)

    def cache(size):
        return draw(B, H, S, size).transpose(1, 2) if head_major else draw(B, S, H, size)

    angles = torch.rand(rows, K // 2, generator=rng).to(device)
    angles = (angles.cos(), angles.sin()) if rows else (None, None)
    weights = (draw(K), draw(K)) if norm else (None, None)
    places = torch.tensor([5, 0, 6], device=device) if S > 1 else None
    v, values = (draw(B, H, V), cache(V)) if V else (None, None)
    # a slice of wider rows, as projections may be
    q = draw(B, 2 * HQ * K)[:, : HQ * K].unflatten(-1, (HQ, K))
    return q, draw(B, H, K), v, *angles, cache(K), values, places, *weights


def run(x, impl):
    """Return the step's results by name; the given caches do not change."""
    *token, keys, values, places, q_weight, k_weight = x
    keys, values = (None if y is None else y.clone(memory_format=torch.preserve_format) for y in (keys, values))
    q = rotate_step(*token, keys, values, places, q_weight, k_weight, eps=1e-3, impl=impl)
    return {name: y for name, y in (("q", q), ("keys", keys), ("values", values)) if y is not None}


@pytest.mark.operation
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("case", ["norms", "angles of each sequence"])
def test_results_do_not_depend_on_layouts(case, impl, device):
    x = inputs(**CASES[case], dtype=torch.float32, device=device)
    names = ("q", "k", "v", "cos", "sin", "keys", "values", "places", "q_weight", "k_weight")
    given = {name: t for name, t in zip(names, x, strict=True) if t is not None}
    missing = dict.fromkeys(names) | given
    differently_laid(lambda **laid: run([(missing | laid)[name] for name in names], impl), given)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_rotation_and_leaves_other_places_alone(case):
    q, k, v, cos, sin, keys, values, places, *weights = x = inputs(**CASES[case])
    rows = torch.arange(3)
    # an angle of zero rotates nothing
    none = torch.zeros(1, 6)
    angles = [x.unsqueeze(1) for x in ((none.cos(), none.sin()) if cos is None else (cos, sin))]
    rotated = [rotate(y.unsqueeze(1), *angles, w, eps=1e-3).squeeze(1) for y, w in zip((q, k), weights, strict=True)]
    keys, at = keys.clone(), 0 if places is None else places
    keys[rows, at] = rotated[1]
    wanted = {"q": rotated[0], "keys": keys}
    if values is not None:
        wanted["values"] = values.clone()
        wanted["values"][rows, at] = v
    for name, y in run(x, "reference").items():
        torch.testing.assert_close(y, wanted[name], rtol=0, atol=0)


@pytest.mark.operation
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("case", CASES)
def test_kernels_err_at_most_twice_as_much_as_the_reference(case, dtype, device):
    x = inputs(**CASES[case], dtype=dtype, device=device)
    exact = run([y.double() if torch.is_tensor(y) and y.dtype == dtype else y for y in x], "reference")
    eager = run(x, "reference")
    for name, y in run(x, "triton").items():
        assert_within(name, y, exact[name], eager[name])


@pytest.mark.operation
def test_repeated_calls_read_and_write_what_they_are_given(device):
    impl = "triton" if device == "cuda" else "reference"
    # the third call is replayed on a GPU
    for shift in range(3):
        x = list(inputs(dtype=torch.float32, device=device))
        x[0], x[7] = x[0] + shift, x[7] * 0 + shift
        got, wanted = run(x, impl), run(x, "reference")
        for name, y in got.items():
            torch.testing.assert_close(y, wanted[name])


@pytest.mark.parametrize(
    ("place", "bad", "said"),
    [
        (0, torch.zeros(3, 4, 11), "k must have shape"),
        (1, torch.zeros(2, 2, 12), "k must have shape"),
        (3, torch.zeros(2, 6), "cos B or 1 rows"),
        (3, None, "cos and sin go together, got only sin"),
        (5, torch.zeros(3, 7, 2, 24)[..., ::2], "keys must have contiguous channels"),
        (6, torch.zeros(3, 8, 2, 12), "values must have shape"),
        (2, None, "v and values go together, got only values"),
        (6, None, "v and values go together, got only v"),
        (7, torch.zeros(3), "positions must be"),
        (9, torch.zeros(11), "k_weight must have shape"),
    ],
)
def test_malformed_steps_are_refused(place, bad, said):
    x = list(inputs(dtype=torch.float32))
    x[place] = bad
    with pytest.raises(ValueError, match=f"rotate_step: .*{said}"):
        rotate_step(*x)


def test_a_cache_without_capacity_is_refused():
    x = list(inputs(dtype=torch.float32, V=0, S=1))
    x[5] = x[5][:, :0]
    with pytest.raises(ValueError, match="rotate_step: keys must have S ≥ 1"):
        rotate_step(*x)
