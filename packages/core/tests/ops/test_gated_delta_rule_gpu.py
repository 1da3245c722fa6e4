"""The gated delta rule's kernels on a GPU: every tile against float64, long and large inputs, graphs, no stalls."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from support.refused import refused_on_3_8
from support.streams import assert_replays, stalls_forbidden
from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.ops import chunk_gated_delta_rule, gated_delta_rule_step, recurrent_gated_delta_rule
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.gated_delta_rule import plan, tuning
from tokenmix_core.testing.agreement import RoundedProducts, values_and_gradients
from tokenmix_core.testing.closeness import assert_within, relative_error

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [64, 128, 256]
PACKED = [0, 0, 1, 64, 129, 129, 300]
SEQUENCES = len(PACKED) - 1
STEPS = ["prepare", "forward", "states", "segment", "entering", "backward_state", "backward_chunk"]


def inputs(B, T, H, HV, K, V, N=None, dtype=torch.bfloat16, kind="mild", seed=0):
    """Random arguments by name; `N` adds an initial state of N sequences."""
    generator = torch.Generator("cuda").manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device="cuda")
    rand = partial(torch.rand, generator=generator, device="cuda")
    g, beta, k = -0.2 * rand(B, T, HV), rand(B, T, HV), randn(B, T, H, K)
    if kind == "extreme":
        g = torch.where(rand(B, T, HV) < 0.2, -1e4, g)
        beta = torch.randint(0, 3, (B, T, HV), generator=generator, device="cuda").float()
    if kind == "repeating":
        g, beta, k = 0.01 * g, torch.full_like(beta, 2.0), k[:, :1].expand(B, T, H, K).contiguous()
    x = {"q": randn(B, T, H, K).to(dtype), "k": k.to(dtype), "v": randn(B, T, HV, V).to(dtype), "g": g, "beta": beta}
    return x | ({"initial_state": randn(N, HV, K, V)} if N else {})


def boundaries(values=PACKED):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def check(x, form=chunk_gated_delta_rule, factor=2.0, upstream=None, **options):
    """Assert that values and gradients err at most `factor` times as much as the eager reference in the same dtype."""
    options = {"qk_l2norm": True} | options
    function = partial(form, impl=None, **options)
    reference = partial(chunk_gated_delta_rule, impl="reference", **options)
    dtype = x["q"].dtype
    # a test may choose other tiles or segments between its calls: cached launches would be replayed
    invalidate()
    got, upstream = values_and_gradients(function, x, upstream)
    exact, _ = values_and_gradients(reference, x, upstream, dtype=torch.float64)
    with RoundedProducts(dtype) if dtype.itemsize == 2 else nullcontext():
        eager, _ = values_and_gradients(reference, x, upstream)
    # half a 16-bit spacing is one rounding; in float32 gates are summed in another order, and rounded some ten times
    floor = torch.finfo(dtype).eps * (0.5 if dtype.itemsize == 2 else 10)
    for name, value in got.items():
        assert_within(name, value, exact[name], eager[name], factor=factor, floor=floor)


@pytest.fixture(autouse=True)
def one_step(monkeypatch):
    """However few heads a test has, the step that makes all gradients is taken where there is one."""
    monkeypatch.setattr(plan, "_BUSY", 0)


def use_tile(override, index):
    """Let every step take the tile of this index in its table (or its last), for any number of heads.

    With index 0 the Hopper forward kernel does not split columns.
    """

    def choose(step, K, V, size, heads):
        table = tuning.all_tiles(step, K, size)
        return table[min(index, len(table) - 1)]

    override(tuning, scan_tile=choose)
    if index == 0:
        override(tuning, forward_columns=lambda programs, V: V)


def tiles(dtype):
    """Return the indices that reach every tile of the tables; both 16-bit dtypes share them, so one covers all."""
    if dtype == torch.float16:
        return [0]
    return range(max(len(tuning.all_tiles(step, K, dtype.itemsize)) for step in STEPS for K in SIZES))


@pytest.mark.parametrize(("dtype", "index"), [(d, i) for d in DTYPES for i in tiles(d)], ids=str)
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("K", SIZES)
def test_every_tile_and_head_size(K, V, dtype, index, override):
    use_tile(override, index)
    x = inputs(1, 300, 1, 2, K, V, N=SEQUENCES, dtype=dtype)
    with refused_on_3_8(K, dtype):
        check(x, cu_seqlens=boundaries())
        check(x | inputs(1, 300, 1, 2, K, V, dtype=dtype, kind="extreme", seed=1), cu_seqlens=boundaries())
        override(tuning, segment_tokens=lambda *_: 64)
        x["g"] *= 0.3
        check(x, cu_seqlens=boundaries())


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 64), (256, 128)])
def test_kernels_of_other_devices(K, V, index, monkeypatch, override):
    monkeypatch.setattr(GluonForm, "limit", lambda *_: "is left out")
    use_tile(override, index)
    x = inputs(1, 300, 1, 2, K, V, N=SEQUENCES)
    check(x, cu_seqlens=boundaries())
    override(tuning, segment_tokens=lambda *_: 64)
    check(x, cu_seqlens=boundaries())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_programs_take_two_steps(dtype, monkeypatch):
    monkeypatch.setattr(plan, "_BUSY", 1000)
    check(inputs(1, 300, 1, 2, 128, 128, N=SEQUENCES, dtype=dtype), cu_seqlens=boundaries())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runs_of_identical_keys(dtype):
    # float32 matmuls are exact to some 2⁻²¹, and reflections along one key do not damp what is lost
    check(inputs(1, 333, 1, 2, 128, 128, dtype=dtype, kind="repeating"), factor=8.0 if dtype.itemsize == 4 else 2.0)


@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000])
def test_every_length_and_grouped_heads(T):
    check(inputs(4, T, 2, 6, 128, 128, N=4))


def test_without_norm_or_states():
    x = inputs(2, 200, 2, 2, 128, 128)
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).bfloat16()
    check(x, qk_l2norm=False, scale=0.3)


@pytest.mark.parametrize("least", [0, 1000], ids=["one step", "two steps"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 64), (256, 64), (256, 256)])
def test_small_gradients_in_float16(K, V, least, monkeypatch):
    monkeypatch.setattr(plan, "_BUSY", least)
    x = inputs(2, 200, 1, 2, K, V, N=2, dtype=torch.float16)
    small = inputs(2, 200, 1, 2, K, V, dtype=torch.float16, seed=1)["v"] / 128
    check(x, upstream={"o": small, "final_state": torch.zeros(2, 2, K, V, device="cuda")})


def test_inputs_that_begin_between_16_bytes():
    x = inputs(1, 130, 1, 1, 64, 64)
    for name in ("q", "k", "v"):
        x[name] = torch.cat([x[name].flatten()[:1], x[name].flatten()])[1:].view_as(x[name])
        assert x[name].data_ptr() % 16
    check(x)


@pytest.mark.parametrize("decay", [0.0, -1e4, float("-inf")])
def test_uniform_decays_stay_finite(decay):
    x = inputs(1, 130, 1, 1, 128, 128, N=1)
    x["g"].fill_(decay)
    results, _ = values_and_gradients(partial(chunk_gated_delta_rule, qk_l2norm=True), x)
    for name, value in results.items():
        assert torch.isfinite(value).all(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_by_token(dtype):
    check(inputs(3, 7, 1, 2, 128, 64, N=3, dtype=dtype), recurrent_gated_delta_rule)


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize(("K", "V"), [(64, 256), (128, 64), (128, 128), (256, 64)])
def test_decoding_overwrites_the_state(batch, K, V, on_hopper):
    impl = None if on_hopper else "triton"
    x = inputs(batch, 1, 8, 16, K, V, N=batch)
    got_state = x.pop("initial_state").contiguous()
    expected_state = got_state.clone()
    token = {name: value[:, 0] for name, value in x.items()}
    got = gated_delta_rule_step(**token, state=got_state, qk_l2norm=True, impl=impl)
    expected = gated_delta_rule_step(**token, state=expected_state, qk_l2norm=True, impl="reference")
    assert relative_error(got, expected) < 4e-3
    assert relative_error(got_state, expected_state) < 1e-6


@pytest.mark.parametrize("decay", [1.0, 0.01])
def test_131072_tokens(decay):
    x = inputs(1, 131_072, 1, 1, 64, 64, N=1)
    x["g"] *= decay
    assert tuning.segment_tokens(1, 1, 131_072) > 0
    check(x)


@pytest.mark.parametrize("T", [1000, 1024, 1025])
def test_segments_of_every_length(T, override):
    override(tuning, segment_tokens=lambda *_: 256)
    x = inputs(2, T, 2, 4, 128, 128, N=2)
    x["g"][1] *= 0.01
    check(x)


def test_more_than_two_to_the_31_elements():
    T, HV, V, tail = 2**20 + 1000, 16, 128, 1000
    assert T * HV * V > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(1, T, HV, V, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    g, beta = torch.full((1, T, HV), -0.05, device="cuda"), torch.full((1, T, HV), 0.7, device="cuda")
    # nothing passes into the tail, which can then be computed alone
    g[:, -tail] = -1e4
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = chunk_gated_delta_rule(*leaves, qk_l2norm=True, impl=None)
    got = [x[:, -tail:].clone() for x in torch.autograd.grad(o, leaves, do)]
    alone = [x.detach()[:, -tail:].double().requires_grad_() for x in leaves]
    expected_o, _ = chunk_gated_delta_rule(*alone, qk_l2norm=True, impl="reference")
    expected = torch.autograd.grad(expected_o, alone, do[:, -tail:].double())
    assert relative_error(o[:, -tail:], expected_o) < 8e-3
    for name, x, y in zip(("q", "k", "v", "g", "beta"), got, expected, strict=True):
        assert relative_error(x, y) < 8e-3, f"d{name}"


def test_results_never_change_between_runs():
    x = inputs(2, 1000, 4, 16, 128, 128, N=2)
    form = partial(chunk_gated_delta_rule, qk_l2norm=True, impl=None)
    first, upstream = values_and_gradients(form, x)
    for _ in range(5):
        again, _ = values_and_gradients(form, x, upstream)
        for name in first:
            assert torch.equal(first[name], again[name]), name


def train_step(x, upstream, **options):
    o, final_state = chunk_gated_delta_rule(**x, qk_l2norm=True, impl=None, **options)
    return o, final_state, *torch.autograd.grad([o, final_state], list(x.values()), upstream)


@pytest.mark.parametrize("packed", [False, True])
def test_training_and_decoding_never_stall_the_stream(packed):
    x = inputs(1, 300, 2, 4, 128, 128, N=SEQUENCES if packed else 1)
    x = {name: value.requires_grad_() for name, value in x.items()}
    options = {"cu_seqlens": boundaries()} if packed else {}
    upstream = [torch.randn_like(y) for y in chunk_gated_delta_rule(**x, impl=None, **options)]
    state = torch.zeros(1, 4, 128, 128, device="cuda")
    token = [x[name].detach()[:, 0] for name in ("q", "k", "v", "g", "beta")]
    train_step(x, upstream, **options)
    gated_delta_rule_step(*token, state)
    with stalls_forbidden():
        train_step(x, upstream, **options)
        gated_delta_rule_step(*token, state)


def test_forward_and_backward_replay_from_a_graph():
    x = {name: value.requires_grad_() for name, value in inputs(1, 1000, 2, 4, 128, 128, N=1).items()}
    upstream = [torch.randn_like(y) for y in chunk_gated_delta_rule(**x, impl=None)]
    assert_replays(partial(train_step, x, upstream))
