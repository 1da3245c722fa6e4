"""Attention over retained keys on a GPU: every tile against float64, sums in parts, graphs, no stall of the stream."""

from __future__ import annotations

import itertools

import pytest
import torch

from tokenmix_core.ops import attention, kept_attention
from tokenmix_core.ops.softmax_attention import tuning as dense_tuning
from tokenmix_core.ops.sparse_attention import kept_attention_reference, tuning
from tokenmix_core.ops.sparse_attention.autograd import kept_attention_backward_op, kept_attention_op
from tokenmix_core.ops.sparse_attention.plan import GLUON
from tokenmix_core.testing.closeness import assert_within, relative_error

pytestmark = pytest.mark.gpu

NAMES = ("o", "lse", "dq", "dk", "dv", "dkeep")
HEADS = dict(HQ=8, H=4, HM=2)
CASES = {
    "tokens": (dict(**HEADS), dict(window=200)),
    "tokens, all kept": (dict(kept=1.0), dict(window=100)),
    "tokens, none kept": (dict(kept=0.0), dict(window=100)),
    "tokens, until": (dict(**HEADS, until=True), dict(window=77)),
    "tokens, each its own unit": (dict(kept=0.1), {}),
    "fewer queries": (dict(TQ=70, TK=1000, **HEADS), dict(window=90)),
    "fewer keys": (dict(TQ=1000, TK=901), dict(window=64)),
    "chunks": (dict(unit=64, **HEADS), {}),
    "chunks of 256": (dict(unit=256, **HEADS, kept=0.8), {}),
    "chunks, a window, until, fewer queries": (dict(TQ=333, TK=1000, unit=128, until=True), dict(window=150)),
    "packed": (dict(B=1, **HEADS, cu=[0, 1, 1, 64, 300, 301, 1000]), dict(window=50)),
    "packed chunks": (dict(B=1, **HEADS, unit=64, cu=[0, 1, 1, 64, 300, 301, 1000]), {}),
    "marks of values": (dict(**HEADS), dict(window=200, keep_gradient="values")),
    "marks of values, until": (dict(**HEADS, until=True), dict(window=77, keep_gradient="values")),
    "marks of values, packed chunks": (
        dict(B=1, **HEADS, unit=64, cu=[0, 1, 1, 64, 300, 301, 1000]),
        dict(keep_gradient="values"),
    ),
    # scores of the first keys are far above those of a query's own tile, whose maxima are subtracted from all
    "great scores": (dict(**HEADS, great=25), dict(window=100)),
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill unwritten memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(
    B=2, TQ=1000, TK=None, HQ=2, H=2, HM=2, K=64, V=None, unit=1, kept=0.3, until=False, cu=None,
    dtype=torch.bfloat16, seed=0, great=1,
):  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(seed)
    TK = TQ if TK is None else TK
    shapes = (B, TQ, HQ, K), (B, TK, H, K), (B, TK, H, V or K)
    tensors = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    tensors[1][:, :9] *= great
    U = -(-TK // unit) if cu is None or unit == 1 else TK // unit + len(cu) - 1
    tensors.append((torch.rand(B, U, HM, device="cuda", generator=generator) < kept).to(dtype))
    options: dict = {"unit": unit}
    if until:
        options["until"] = torch.randint(0, TK, (B, TK, H), device="cuda", generator=generator, dtype=torch.int32)
    if cu is not None:
        options["cu_seqlens"] = torch.tensor(cu, device="cuda", dtype=torch.int32)
    return [x.requires_grad_() for x in tensors], options


def answers_to_float64(
    sizes: dict, mask: dict, dtype: torch.dtype, K: int, V: int | None = None, impl: str = "triton"
):  # fmt: skip
    tensors, options = inputs(**sizes, K=K, V=V, dtype=dtype)
    options |= mask
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact_out = kept_attention_reference(*wide, **options)
    blind = exact_out.lse.isneginf()
    generator = torch.Generator("cuda").manual_seed(1)
    up = [torch.randn(x.shape, device="cuda", generator=generator).to(dtype).masked_fill(m, 0)
          for x, m in zip(exact_out, (blind[..., None], blind), strict=True)]  # fmt: skip

    def run(forward, inputs, **more):
        out = forward(*inputs, **options, **more)
        out = out.o, out.lse.masked_fill(out.lse.isneginf(), 0)
        if "great" in sizes:
            return out
        grads = torch.autograd.grad(
            out, inputs, [g.to(x) for g, x in zip(up, out, strict=True)], materialize_grads=True
        )
        return *out, *grads

    got = run(kept_attention, tensors, impl=impl)
    exact, baseline = run(kept_attention_reference, wide), run(kept_attention_reference, tensors)
    for name, x, e, b in zip(NAMES[: len(got)], got, exact, baseline, strict=True):
        # the gradient of `keep` sums thousands of terms of either sign
        floor = 16 if name == "dkeep" and dtype == torch.float32 else 1
        assert_within(name, x, e, b, floor=floor * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize(("sizes", "mask"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_kernels_answer_to_float64(K, V, dtype, sizes, mask):
    answers_to_float64(sizes, mask, dtype, K, V)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("TQ", [5000, 3001])
def test_blocks_of_queries_match_float64(TQ, dtype):
    tensors, options = inputs(**HEADS, B=1, TQ=TQ, TK=5000, kept=0.8, until=True, dtype=dtype)
    tensors = [x.detach() for x in tensors]
    options["window"] = 300
    got = kept_attention(*tensors, **options)
    baseline = kept_attention_reference(*tensors, **options)
    exact = kept_attention_reference(*(x.double() for x in tensors), **options)
    for name, x, e, b in zip(got._fields, got, exact, baseline, strict=True):
        assert_within(name, x, e, b)


needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and GLUON.limit(torch.device("cuda", 0), torch.bfloat16) is not None,
    reason="kernels in Gluon run on Hopper",
)
GLUON_CASES = {name: case for name, case in CASES.items() if "until" not in case[0]}


@needs_hopper
@pytest.mark.parametrize(("sizes", "mask"), GLUON_CASES.values(), ids=GLUON_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_kernels_for_hopper_answer_to_float64(K, V, dtype, sizes, mask):
    answers_to_float64(sizes, mask, dtype, K, V, "gluon")


@needs_hopper
@pytest.mark.parametrize("tile", [(64, 64, 4, 1, 168), (128, 64, 8, 1, 128), (128, 64, 4, 1, 255)], ids=str)
@pytest.mark.parametrize("case", ["tokens", "fewer queries", "chunks", "packed"])
def test_other_tiles_for_hopper_answer_to_float64(case, tile, override):
    override(tuning.HOPPER_FORWARD, {(64, 64): tuning.AttentionTile(*tile)})
    answers_to_float64(*CASES[case], torch.bfloat16, 64, impl="gluon")


@needs_hopper
def test_kernels_for_hopper_give_the_same_bits_in_every_run():
    (*x, keep), options = inputs(B=1, TQ=3000, **HEADS)
    up = torch.randn_like(x[0])
    runs = []
    for _ in range(5):
        out = kept_attention(*x, keep, window=200, impl="gluon", **options)
        runs.append((out.o, out.lse, *torch.autograd.grad(out.o, (*x, keep), up)))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("case", ["tokens", "tokens, until", "chunks", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "V"), [(256, 256), (16, 16), (80, 80), (96, 200)])
def test_kernels_take_wide_and_odd_head_sizes(K, V, dtype, case):
    answers_to_float64(*CASES[case], dtype, K, V)


@pytest.mark.parametrize("impl", ["triton", pytest.param("gluon", marks=needs_hopper)])
@pytest.mark.parametrize("programs", [3, 40])
@pytest.mark.parametrize(
    "case",
    ["tokens", "tokens, until", "chunks", "packed", "packed chunks", "marks of values", "marks of values, until"],
)
def test_sums_in_parts_answer_to_float64(case, programs, impl, override):
    if impl == "gluon" and case not in GLUON_CASES:
        pytest.skip("kernels in Gluon take no until")
    override(dense_tuning, work_tiles=lambda *call: programs)
    answers_to_float64(*CASES[case], torch.bfloat16, 64, impl=impl)


def test_all_kept_is_causal_attention_and_none_kept_the_window():
    for kept, window in ((1.0, None), (0.0, 768)):
        (*x, keep), _ = inputs(B=1, TQ=5000, **HEADS, kept=kept)
        up = torch.randn_like(x[0])
        results = []
        for out in (kept_attention(*x, keep, window=768), attention(*x, window=window, impl="triton")):
            results.append((out.o, out.lse, *torch.autograd.grad(out.o, x, up)))
        for got, want in zip(*results, strict=True):
            assert relative_error(got, want) < 8e-3


def test_a_long_sequence_whose_first_keys_are_kept():
    (q, k, v, keep), _ = inputs(1, 131_072, HQ=4, H=2, HM=1, K=64, kept=0.0)
    marks = torch.zeros_like(keep, dtype=torch.bool)
    marks[:, :70] = True
    out = kept_attention(q, k, v, marks, window=1024)
    up = torch.randn_like(out.o)
    grads = torch.autograd.grad(out.o, (q, k, v), up)
    again = kept_attention(q, k, v, marks, window=1024).o
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(again, (q, k, v), up), strict=True))
    # the last 1,024 rows in float64, which see 2,047 keys and the first ones
    near = [x.detach()[:, -2048:].double().requires_grad_() for x in (q, k, v)]
    far = [x.detach()[:, :70].double() for x in (k, v)]
    columns = [torch.cat(x, 1) for x in zip(far, near[1:], strict=True)]
    marks = (torch.arange(2118, device="cuda") < 70)[None, :, None]
    exact_o = kept_attention_reference(near[0], *columns, marks, window=1024).o
    exact = torch.autograd.grad(exact_o[:, 1024:], near, up[:, -1024:].double())
    assert relative_error(out.o[:, -1024:], exact_o[:, 1024:]) < 4e-3
    assert relative_error(grads[0][:, -1024:], exact[0][:, 1024:]) < 6e-3
    for a, e in zip(grads[1:], exact[1:], strict=True):
        assert relative_error(a[:, -1:], e[:, -1:]) < 8e-3
    # the first key's gradient gathers all queries: v's is linear in what they give it
    p = ((q.double().unflatten(2, (2, 2)) * k[:, :1].double().unsqueeze(3)).sum(-1) / 8).flatten(2, 3) - out.lse
    dv = (p.exp()[..., None] * up.double()).unflatten(2, (2, 2)).sum((1, 3))
    assert relative_error(grads[2][:, 0], dv) < 6e-3


def test_views_give_the_same_bits():
    wide = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    keep = torch.rand(2, 2, 300, device="cuda").mT < 0.3
    up = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    grads = []
    for copy in (False, True):
        x = [(t.contiguous() if copy else t).detach().requires_grad_() for t in wide.unbind(2)]
        marks = keep.contiguous() if copy else keep
        grads.append(torch.autograd.grad(kept_attention(*x, marks, window=100).o, x, up))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("case", ["tokens", "chunks", "packed"])
def test_forward_and_backward_replay_in_a_graph_with_other_marks(case):
    (*x, keep), options = inputs(**CASES[case][0])
    options |= CASES[case][1]

    def run():
        o = kept_attention(*x, keep, **options).o
        return o, *torch.autograd.grad(o, (*x, keep), torch.ones_like(o))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    with torch.no_grad():
        for t in x:
            t.normal_()
        keep.copy_(torch.rand_like(keep) < 0.6)
    graph.replay()
    for a, b in zip(got, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(("sizes", "mask"), CASES.values(), ids=CASES)
def test_nothing_stalls_the_stream(sizes, mask):
    tensors, options = inputs(**sizes)
    torch.use_deterministic_algorithms(False)

    def run():
        out = kept_attention(*tensors, **options, **mask)
        torch.autograd.grad((out.o, out.lse), tensors, [torch.ones_like(x) for x in out])

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_enter_the_launch_cache_and_are_replayed():
    tensors, options = inputs(**CASES["tokens"][0])
    runs = []
    for _, scale in itertools.product(range(2), (0.1, 0.2)):
        out = kept_attention(*tensors, window=200, scale=scale, **options)
        runs.append((out.o, *torch.autograd.grad(out.o, tensors, torch.ones_like(out.o))))
    for first, later in zip(runs[:2], runs[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, later, strict=True))
    assert not torch.equal(runs[0][0], runs[1][0])


@pytest.mark.parametrize("filled", [False, True])
def test_operators_keep_torchs_rules(filled):
    # calls that are replayed fill no memory, whatever torch is asked for
    torch.use_deterministic_algorithms(filled, warn_only=True)
    tensors, _ = inputs(B=1, TQ=70, dtype=torch.float32)
    rest = (None, None, 1, 20, 0.5, "values", "triton")
    torch.library.opcheck(kept_attention_op, (*tensors, *rest))
    found = [x.detach() for x in kept_attention_op(*tensors, *rest)]
    given = (*(x.detach() for x in tensors), *rest)
    torch.library.opcheck(kept_attention_backward_op, (*given, *found, found[0], None, True))


def test_memory_is_that_of_causal_attention():
    (q, k, v, keep), _ = inputs(1, 32_768, HQ=16, H=16, HM=16, K=64, kept=1.0)
    up = torch.randn_like(q)
    peaks = []
    for forward in (lambda: kept_attention(q, k, v, keep, window=768).o, lambda: attention(q, k, v, impl="sdpa").o):
        torch.autograd.grad(forward(), (q, k, v), up)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(forward(), (q, k, v), up)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 1.1 * peaks[1], peaks
