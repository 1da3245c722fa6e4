"""The contract of the gated delta rule, and tests of extreme gates, segments and the order of segments."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops import (
    chunk_gated_delta_rule,
    gated_delta_rule_prefill,
    gated_delta_rule_step,
    recurrent_gated_delta_rule,
)
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.gqa_reduce import sum_groups
from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.testing.agreement import assert_agrees, gradients_through, values_and_gradients, watched
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.operations import HALF, Call, KernelCase, OpContract
from tokenmix_core.testing.slot_contract import PrefillTests

PACKED = [0, 0, 1, 64, 64, 129]


def inputs(B=2, T=70, H=1, HV=2, K=16, V=16, N=None, dtype=torch.float64, device="cpu", seed=0):
    """Random arguments by name, β in [0, 2]; `N` adds an initial state of N sequences."""
    generator = torch.Generator(device).manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device=device)
    rand = partial(torch.rand, generator=generator, device=device)
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    x = {
        "q": randn(B, T, H, K).to(dtype),
        "k": randn(B, T, H, K).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": -rand(B, T, HV).to(gate),
        "beta": 2 * rand(B, T, HV).to(gate),
    }
    return x | ({"initial_state": randn(N, HV, K, V).to(gate)} if N else {})


def z(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def by_tokens(q, k, v, g, beta, initial_state, scale, qk_l2norm):
    """Yang et al. 2025, eq. 10, whose state is [V, K]."""
    B, T, HV, V = v.shape
    if qk_l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    K, one = q.shape[3], torch.eye(q.shape[3], dtype=q.dtype)
    S, outputs = v.new_zeros(B, HV, V, K) if initial_state is None else initial_state.mT, []
    for t in range(T):
        kt, b = k[:, t], beta[:, t, :, None, None]
        keep = g[:, t].exp()[..., None, None] * (one - b * kt.unsqueeze(3) * kt.unsqueeze(2))
        S = S @ keep + b * v[:, t].unsqueeze(3) * kt.unsqueeze(2)
        outputs.append(scale * (S @ q[:, t].unsqueeze(3)).squeeze(3))
    return ScanOutput(torch.stack(outputs, 1), S.mT)


def in_segments(override):
    """Sequences in segments of one chunk."""
    override(tuning, segment_tokens=lambda *_: 64)


class TestGatedDeltaRule(PrefillTests, OpContract):
    covers = (chunk_gated_delta_rule, recurrent_gated_delta_rule, gated_delta_rule_prefill, gated_delta_rule_step)
    prefill = (gated_delta_rule_prefill, dict(K=64, V=64, N=5, boundaries=[0, 0, 1, 64, 200, 203]))
    prefill_patches: ClassVar = {"segments": in_segments}
    forms: ClassVar = {"chunks": chunk_gated_delta_rule, "tokens": recurrent_gated_delta_rule}
    tokens = ("q", "k", "v", "g", "beta")
    state = ("initial_state", "final_state")
    # 16-bit matmuls are tested on a GPU
    dtypes = ("float32",)
    cases: ClassVar = {
        "groups and states": dict(T=70, H=2, HV=4, K=4, V=3, N=2),
        "keys of any length": dict(T=70, K=4, V=3, qk_l2norm=False),
    }
    lengths = (1, 63, 64, 65, 131)
    kernels: ClassVar = {
        "ragged, with states": KernelCase(dict(T=70, K=64, V=64, N=2)),
        "packed, with states": KernelCase(dict(K=64, V=128, N=5, boundaries=PACKED)),
        "keys that are normalised before": KernelCase(dict(B=1, T=65, HV=1, K=128, V=64, qk_l2norm=False)),
        "by tokens": KernelCase(dict(B=1, T=3, K=64, V=64, N=1), "tokens"),
    }
    parts: ClassVar = {"of a sequence": dict(T=70, K=8, V=8)}
    step = (gated_delta_rule_step, dict(K=64, V=64, N=2))
    packed: ClassVar = {"of documents": dict(K=4, V=4, N=5, boundaries=PACKED)}
    neighbours: ClassVar = dict(B=3, T=3, HV=1, K=64, V=64, N=3)
    on_gpu: ClassVar = {"heads of 128": dict(B=2, T=150, HV=2, K=128, V=128, N=2)}
    traced: ClassVar = dict(B=1, HV=1, K=64, V=64, N=1)
    replayed: ClassVar = dict(B=1, T=3, HV=1, K=64, V=64, N=1)
    valid: ClassVar = dict(T=5)
    malformed: ClassVar = {
        "a missing axis": ({"q": z(5, 1, 16)}, r"q must have shape \[.*got \[5, 1, 16\]"),
        "a list": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
        "no beta": ({"beta": None}, "beta must be a tensor .*, got None"),
        "a beta for all": ({"beta": 1.0}, "beta must be a tensor .* got float"),
        "keys of another size": (
            {"k": z(2, 5, 1, 8)}, r"k must have shape \[B, T, H, K\] with .*K=16, got \[2, 5, 1, 8\]"
        ),
        "keys of other heads": ({"k": z(2, 5, 3, 16)}, r"k must have shape \[.*got \[2, 5, 3, 16\]"),
        "values of another length": ({"v": z(2, 6, 2, 16)}, r"v must have shape \[.*got \[2, 6, 2, 16\]"),
        "a beta for all heads": ({"beta": z(2, 5)}, r"beta must have shape .*, got \[2, 5\]"),
        "a decay for each channel": ({"g": z(2, 5, 2, 1)}, r"g must have shape \[.*got \[2, 5, 2, 1\]"),
        "heads that do not divide": (dict.fromkeys("qk", z(2, 5, 3, 16)), "multiple of H, got HV=2 and H=3"),
        "mixed dtypes": ({"k": z(2, 5, 1, 16, dtype=torch.bfloat16)}, "share one dtype, got q float32, k bfloat16"),
        "integers": (dict.fromkeys("qk", z(2, 5, 1, 16, dtype=torch.long)), "q must be .*, got int64"),
        "a state of other rows": (
            {"initial_state": z(3, 2, 16, 16)}, r"initial_state must have shape .*N=2, got \[3, 2, 16, 16\]"
        ),
        "a half-precision state": ({"initial_state": z(2, 2, 16, 16, dtype=torch.float16)}, "got float16"),
        "no rows": (lambda x: x | {name: x[name][:0] for name in ("q", "k", "v", "g", "beta")}, "at least 1, got B=0"),
        "packed rows": ({"cu_seqlens": torch.tensor([0, 5])}, "a packed batch has B = 1, got B = 2"),
        "boundaries in a list": ({"cu_seqlens": [0, 5]}, r"cu_seqlens must be a tensor of shape \[.*\], got list"),
        "an unknown implementation": ({"impl": "cuda"}, "one of 'gluon', 'triton', 'reference', got 'cuda'"),
        "heads without a kernel": (
            {"impl": "triton"}, r"K in \{64, 128, 256\}, got K=16; pad the heads, or pass impl='reference'"
        ),
        "a scale that is no number": ({"scale": float("nan")}, "scale must be a finite number, got nan"),
        "a list of scales": ({"scale": [1.0]}, r"scale must be a finite number, got \[1.0\]"),
    }  # fmt: skip
    malformed_steps: ClassVar = {
        "a state of other sizes": ({"state": z(2, 2, 32, 64)}, r"state must have shape \[.*got \[2, 2, 32, 64\]"),
        "a half-precision state": ({"state": z(2, 2, 64, 64, dtype=torch.bfloat16)}, "got bfloat16"),
        "a state whose channels lie apart": ({"state": z(2, 2, 64, 64).mT}, "contiguous to be overwritten"),
        "two tokens": ({"q": z(2, 1, 1, 64)}, r"q must have shape \[.*got \[2, 1, 1, 64\]"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, boundaries=None, qk_l2norm=True, **sizes) -> Call:
        options = {"qk_l2norm": qk_l2norm, "scale": 0.3}
        if boundaries is not None:
            options["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32, device=device)
            sizes |= {"B": 1, "T": boundaries[-1]}
        x = inputs(**sizes, dtype=dtype, device=device, seed=seed)
        if not qk_l2norm:
            x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
        return Call(x, options)

    def definition(self, q, k, v, g, beta, *, scale, qk_l2norm, initial_state=None):
        return by_tokens(q, k, v, g, beta, initial_state, scale, qk_l2norm)

    def operators(self, device):
        from tokenmix_core.ops.gated_delta_rule import autograd as ops

        x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
        arguments = tuple(value.requires_grad_() for value in x.values())
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        for op in (ops.chunk_op, ops.recurrent_op):
            yield op, (*arguments, None, None, 0.5, True), *tests
        arguments = [value.detach() for value in arguments]
        o, final_state, *terms = ops.chunk_op(*arguments, None, None, 0.5, True)
        yield ops.backward_op, (o, final_state, *terms, *arguments, None, None, 0.5, True), *tests
        arguments = [*(value[:, 0] for value in arguments[:5]), arguments[5], 0.5, True]
        yield ops.step_op, arguments, *tests
        yield ops.step_op, (*arguments, None, torch.zeros(1, dtype=torch.int32, device=device)), *tests
        slots, fresh = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.bool, device=device)
        *tokens, state = (value.detach() for value in x.values())
        yield ops.prefill_op, (state, slots, fresh, *tokens, None, None, None, 0.5, True), *tests


def boundaries(values=PACKED, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(x, form=chunk_gated_delta_rule, **options):
    options = {"qk_l2norm": True} | options
    assert_agrees(partial(form, impl="triton", **options), partial(form, impl="reference", **options), x)


@pytest.mark.parametrize("decay", [0.0, -1e4, float("-inf")])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_extreme_gates_stay_finite_in_the_reference(decay, beta):
    x = inputs(T=70, K=8, V=8, dtype=torch.float32)
    x["k"][:, 10:] = x["k"][:, 10:11]
    x["g"].fill_(decay)
    x["beta"].fill_(beta)
    # the definition itself has no gradient at −∞
    results, _ = values_and_gradients(partial(chunk_gated_delta_rule, qk_l2norm=True), x)
    for name, value in results.items():
        assert torch.isfinite(value).all(), name


def test_kernels_agree_for_extreme_gates(device):
    x = inputs(B=1, T=70, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    # β = 2 between decays near 1 is badly conditioned: where is a matter of the draw, so the draw is the same each time
    hard = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(0)) < 0.2
    x["g"] = torch.where(hard.to(device), -1e4, 0.1 * x["g"])
    x["beta"][:, 5:9] = 0
    x["beta"][:, 20:30] = 2
    check(x)


# decays that are negligible over a segment, that are not, and the first followed by the second
@pytest.mark.parametrize("slow", [slice(0), slice(None), slice(130, None)], ids=["fast", "slow", "mixed"])
def test_sequences_split_into_segments_agree(slow, device, override):
    override(tuning, segment_tokens=lambda *_: 64)
    x = inputs(B=1, T=200, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    x["g"] *= 4
    x["g"][:, slow] *= 0.01
    check(x)


# limits of negligible decays differ by half a power of two between steps, so that none reads a state another left out
@pytest.mark.parametrize("left", [-31.5, -32.25, -32.75, -33.5])
def test_segments_with_barely_negligible_decays_agree(left, device, override):
    override(tuning, segment_tokens=lambda *_: 128)
    x = inputs(B=1, T=400, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    # base-2 logarithm of the decay over a chunk of 64 tokens
    x["g"][:] = left / 64 * math.log(2)
    check(x)


def test_segments_follow_the_boundaries_of_packed_sequences(device, override):
    override(tuning, segment_tokens=lambda *_: 128)
    x = inputs(B=1, T=270, HV=1, K=64, V=64, dtype=torch.float32, device=device)
    x["g"] *= 0.1
    x["initial_state"] = torch.randn(4, 1, 64, 64, device=device)
    check(x, cu_seqlens=boundaries([0, 0, 2, 2, 270], device))


@pytest.mark.parametrize("segment", [0, 64, 128])
@pytest.mark.parametrize("N", [1, 7, 200])
def test_packed_segments_start_with_the_longest(N, segment, device):
    from tokenmix_core.ops.gated_delta_rule.tile_order import longest_first

    T = 2000
    inner = torch.randint(0, T + 1, (N - 1,), generator=torch.Generator().manual_seed(0)).sort().values
    cuts = [0, *inner.tolist(), T]
    slots, size = chunk_slots(1, T, segment or T + 1, boundaries(cuts)), segment or T + 1
    lengths = [0] * slots
    for n, (start, end) in enumerate(pairwise(cuts)):
        for i, first in enumerate(range(start, end, size)):
            lengths[start // size + n + i] = min(size, end - first)
    order = longest_first(T, segment, boundaries(cuts, device)).tolist()
    assert order == sorted(range(slots), key=lambda slot: (-lengths[slot], slot))


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_one_output_alone_may_be_differentiated(device, used):
    x = inputs(B=1, T=4, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    form = partial(chunk_gated_delta_rule, qk_l2norm=True)
    got, expected = (gradients_through(partial(form, impl=impl), x, used) for impl in ("triton", "reference"))
    for name in x:
        assert relative_error(got[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_over_groups_are_rounded_once(device, dtype):
    dq, dk = torch.randn(2, 3, 37, 6, 48, device=device).to(dtype)
    for x, y in zip((dq, dk), sum_groups(dq, dk, 2), strict=True):
        assert torch.equal(y, x.view(3, 37, 2, 3, 48).float().sum(3).to(dtype))


def test_gradients_keep_the_dtypes_of_their_inputs(device):
    x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=HALF, device=device)
    x["g"] = x["g"].to(HALF)
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    o, final_state = chunk_gated_delta_rule(**leaves, qk_l2norm=True, impl="triton")
    assert (o.dtype, final_state.dtype) == (HALF, torch.float32)
    for value, grad in zip(leaves.values(), torch.autograd.grad(o.sum(), list(leaves.values())), strict=True):
        assert (grad.dtype, grad.shape) == (value.dtype, value.shape)


def test_a_backward_pass_shows_itself_to_a_mode_that_watches(device):
    x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
    leaves = [value.requires_grad_() for value in x.values()]
    output = chunk_gated_delta_rule(**x, qk_l2norm=True, impl="triton")
    backward = partial(torch.autograd.grad, output, leaves, [value.detach() for value in output], retain_graph=True)
    wanted = backward()
    got, seen = watched(backward)
    assert "tokenmix.gated_delta_rule_backward.default" in seen
    assert all(map(torch.equal, got, wanted))
