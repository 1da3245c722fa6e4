"""Test attention on a GPU: every tile and backend against float64, sizes, graphs, and no synchronisation."""

from __future__ import annotations

import gc

import pytest
import torch

from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch import fit, launcher
from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.ops import attention, attention_decode, merge_attention, paged_attention_decode
from tokenmix_core.ops.softmax_attention import attention_reference, choose_impl, forward, plan
from tokenmix_core.ops.softmax_attention.autograd import attention_backward_op, attention_decode_op, attention_op
from tokenmix_core.ops.softmax_attention.backends import cudnn_heads, flash_attention, limit, on_hopper
from tokenmix_core.ops.softmax_attention.plan import GLUON
from tokenmix_core.ops.softmax_attention.types import Call, Mask
from tokenmix_core.testing.closeness import assert_within, relative_error

pytestmark = pytest.mark.gpu


def fastest_of_ours(K: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return Gluon kernels if there are any for such heads on this device, else portable kernels."""
    return "gluon" if K in (64, 128) and GLUON.limit(torch.device("cuda", 0), dtype) is None else "triton"


NAMES = ("o", "lse", "dq", "dk", "dv")
CASES = {
    "causal": {},
    "bidirectional, ragged": dict(TQ=333, TK=1000, causal=False),
    "window": dict(window=200),
    "window and sinks, grouped heads": dict(window=100, sinks=77, HQ=8, H=2),
    "fewer queries": dict(TQ=70, window=300, sinks=5),
    "fewer keys": dict(TQ=1000, TK=901),
    "packed": dict(B=1, cu_seqlens=[0, 1, 1, 64, 300, 301, 1000]),
    "packed, window and sinks": dict(B=1, window=50, sinks=9, cu_seqlens=[0, 500, 500, 565, 1000]),
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill unwritten memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(B=2, TQ=1000, TK=None, HQ=4, H=4, K=64, V=None, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    TK = TQ if TK is None else TK
    shapes = (B, TQ, HQ, K), (B, TK, H, K), (B, TK, H, V or K)
    return [torch.randn(s, device="cuda", generator=generator).to(dtype).requires_grad_() for s in shapes]


def answers_to_float64(
    case: dict, dtype: torch.dtype, impl: str | None, K: int, V: int | None = None, through_lse=True, gradients=True
):  # fmt: skip
    mask = {name: case[name] for name in ("causal", "window", "sinks") if name in case}
    sizes = {name: case[name] for name in ("B", "TQ", "TK", "HQ", "H") if name in case}
    if sizes.get("TQ") == 70:
        sizes["TK"] = 1000
    if "cu_seqlens" in case:
        mask["cu_seqlens"] = torch.tensor(case["cu_seqlens"], device="cuda", dtype=torch.int32)
    x = inputs(K=K, V=V, dtype=dtype, **sizes)
    with torch.no_grad():
        x[1][:, :9] *= case.get("great", 1)
    wide = [t.detach().double().requires_grad_() for t in x]
    exact_out = attention_reference(*wide, **mask)
    blind = exact_out.lse.isneginf()
    generator = torch.Generator("cuda").manual_seed(1)
    up = [torch.randn(t.shape, device="cuda", generator=generator).to(dtype).masked_fill(b, 0)
          for t, b in zip(exact_out, (blind[..., None], blind), strict=True)]  # fmt: skip

    def run(forward, inputs):
        out = forward(*inputs, **mask)
        if not gradients:
            return out.o, out.lse.masked_fill(blind, 0)
        used = 2 if through_lse else 1
        grads = torch.autograd.grad(out[:used], inputs, [g.to(y) for g, y in zip(up, out, strict=True)][:used])
        return out.o, out.lse.masked_fill(blind, 0), *grads

    got = run(lambda *a, **kw: attention(*a, **kw, impl=impl), x)
    assert (attention(*x, **mask, impl=impl).lse.isneginf() == blind).all()
    exact, baseline = run(attention_reference, wide), run(attention_reference, x)
    for name, a, e, b in zip(NAMES[: len(got)], got, exact, baseline, strict=True):
        assert_within(name, a, e, b)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_kernels_answer_to_float64(K, dtype, case):
    answers_to_float64(case, dtype, fastest_of_ours(K, dtype), K)


@pytest.mark.parametrize(
    "case", ["window", "window and sinks, grouped heads", "fewer queries", "packed, window and sinks"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("K", [64, 128])
def test_windows_for_hopper_answer_to_float64(K, dtype, case):
    if fastest_of_ours(K, dtype) != "gluon":
        pytest.skip("kernels in Gluon run on Hopper")
    answers_to_float64(CASES[case], dtype, "gluon", K)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("K", [64, 128])
def test_kernels_for_other_devices_answer_to_float64(K, case):
    answers_to_float64(case, torch.bfloat16, "triton", K)


@pytest.fixture(params=[True, False], ids=["warp-specialised", "one warpgroup"])
def many_blocks(monkeypatch, override, request):
    """Select the warp-specialised forward kernel, or that of one warpgroup: any call has enough blocks for one SM."""
    override(tuning, sm_count=lambda device: 1)
    for name in ("_LONG", "_WIDE"):
        monkeypatch.setattr(plan, name, 1 if request.param else 1 << 30)


# scores of the first keys far exceed those of a query's own tile, whose maxima are subtracted from all scores
GREAT = {
    "causal": dict(great=30),
    "bidirectional, ragged": dict(TQ=333, TK=1000, causal=False, great=30),
    "window and sinks, grouped heads": dict(window=100, sinks=9, HQ=8, H=2, great=30),
    "a little above": dict(great=10),
    "packed": dict(B=1, cu_seqlens=[0, 1, 1, 64, 300, 301, 1000], great=30),
}


@pytest.mark.parametrize("case", GREAT.values(), ids=GREAT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("K", [64, 128])
def test_scores_far_above_those_of_the_own_tile_are_met_once_more(many_blocks, K, dtype, case):
    answers_to_float64(case, dtype, fastest_of_ours(K), K, gradients=False)


MANY = CASES | {"wide window": dict(B=1, TQ=2500, window=2100, sinks=5, HQ=2, H=1)}


@pytest.mark.parametrize("case", MANY.values(), ids=MANY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_for_many_blocks_answer_to_float64(many_blocks, dtype, case):
    answers_to_float64(case, dtype, fastest_of_ours(128), 128)


@pytest.mark.parametrize("window", [None, 100])
def test_kernels_for_many_blocks_give_the_same_bits_in_every_run(many_blocks, window):
    x = inputs(TQ=2000, HQ=8, H=4, K=128)
    up = torch.randn(2, 2000, 8, 128, device="cuda", dtype=torch.bfloat16)
    first, *others = (
        torch.autograd.grad(attention(*x, window=window, impl=fastest_of_ours(128)).o, x, up) for _ in range(20)
    )
    assert all(torch.equal(a, b) for grads in others for a, b in zip(grads, first, strict=True))


@pytest.mark.parametrize("impl", ["fastest of ours", "triton", None])
def test_slices_of_a_wider_tensor_give_the_same_gradients(impl):
    impl = fastest_of_ours(64) if impl == "fastest of ours" else impl
    wide = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
    grads = []
    for copy in (False, True):
        x = [(t.contiguous() if copy else t).detach().requires_grad_() for t in wide.unbind(2)]
        grads.append(torch.autograd.grad(attention(*x, window=100, impl=impl).o, x, up))
    assert all(relative_error(a, b) < 1e-3 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("case", [CASES["causal"], CASES["window and sinks, grouped heads"]], ids=["causal", "window"])
@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 64), (256, 64), (128, 256), (16, 16), (80, 80), (96, 200)])
def test_kernels_take_unequal_and_odd_head_sizes(K, V, case):
    answers_to_float64(case, torch.bfloat16, "triton", K, V)


def libraries_limit(case: dict, impl: str) -> str | None:
    sizes = dict(TQ=1000, TK=1000, causal=True, window=None, sinks=0) | case
    mask = Mask(sizes["causal"], sizes["window"], sizes["sinks"])
    call = Call("cuda", torch.bfloat16, sizes["TQ"], sizes["TK"], 128, 128, mask, "cu_seqlens" in case)
    return limit(impl, call)


def need(impl: str, version: int | None = None) -> None:
    """Skip a test of "flash_attn" if FlashAttention, or its `version`, is not installed."""
    if impl == "flash_attn" and flash_attention() not in ((2, 4) if version is None else (version,)):
        pytest.skip(f"FlashAttention-{version or '2 or 4'} is not what runs here")


# calls that FlashAttention-2 supports: no sinks besides a window, and keys for all queries
LIBRARIES = {name: case for name, case in CASES.items() if libraries_limit(case, "sdpa") is None}
LIBRARIES["fewer queries, no sinks"] = dict(TQ=70, window=300)


@pytest.mark.parametrize("through_lse", [False, True], ids=["o alone", "o and lse"])
@pytest.mark.parametrize("case", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("impl", ["sdpa", "flash_attn"])
def test_libraries_answer_to_float64(impl, case, through_lse):
    need(impl)
    answers_to_float64(case, torch.bfloat16, impl, 128, through_lse=through_lse)


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "one order"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("K", [64, 96, 128, 256])
@pytest.mark.parametrize("case", LIBRARIES.values(), ids=LIBRARIES)
def test_flash_attention_4_answers_to_float64(case, K, dtype, deterministic):
    need("flash_attn", 4)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    answers_to_float64(case | dict(HQ=8, H=2), dtype, "flash_attn", K)


def test_flash_attention_4_is_run_every_time_and_follows_its_inputs():
    need("flash_attn", 4)
    for seed in range(3):
        x = inputs(TQ=300, K=64, seed=seed)
        up = torch.ones_like(x[0])
        results = []
        for impl in ("flash_attn", "triton"):
            o = attention(*x, window=100, impl=impl).o
            results.append((o, *torch.autograd.grad(o, x, up)))
        for got, wanted in zip(*results, strict=True):
            assert relative_error(got, wanted) < 8e-3


LAYOUTS = {
    "begins anywhere": lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
    "elements apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows of odd length": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "one head repeated": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("impl", ["sdpa", "flash_attn"])
def test_libraries_read_any_layout(impl, window, layout):
    need(impl)
    *x, up = (layout(t.detach()) for t in (*inputs(TQ=200, K=128), inputs(TQ=200, K=128, seed=1)[0]))
    results = []
    for make in (lambda t: t, lambda t: t.contiguous().clone()):
        leaves = [make(t).detach().requires_grad_() for t in x]
        o = attention(*leaves, window=window, impl=impl).o
        results.append((o, *torch.autograd.grad(o, leaves, make(up))))
    for got, wanted in zip(*results, strict=True):
        assert relative_error(got, wanted) < 8e-3


@pytest.mark.parametrize("case", ["causal", "bidirectional, ragged"])
@pytest.mark.parametrize(("K", "V"), [(256, 256), (128, 64), (64, 128), (256, 128), (96, 200)])
def test_cudnn_answers_to_float64_with_large_and_unequal_heads(K, V, case):
    if max(K, V) > cudnn_heads():
        pytest.skip(f"cuDNN takes heads up to {cudnn_heads()} here")
    answers_to_float64(CASES[case], torch.bfloat16, "sdpa", K, V, through_lse=False)


def test_the_default_is_right_for_every_case():
    for case in CASES.values():
        answers_to_float64(case, torch.bfloat16, None, 128, through_lse=False)


def test_a_long_sequence_with_a_window():
    x = inputs(1, 131_072, HQ=2, H=1, K=128)
    out = attention(*x, window=1024, sinks=4)
    g = torch.randn_like(out.o)
    grads = torch.autograd.grad(out.o, x, g)
    # compute the last 1,024 rows in float64; they see 2,047 keys and the sinks
    near = [t.detach()[:, -2048:].double().requires_grad_() for t in x]
    sinks = [t.detach()[:, :4].double() for t in x[1:]]
    o = attention_reference(
        near[0], *(torch.cat(t, 1) for t in zip(sinks, near[1:], strict=True)), window=1024, sinks=4
    ).o
    exact = torch.autograd.grad(o[:, 1024:], near, g[:, -1024:].double())
    assert relative_error(out.o[:, -1024:], o[:, 1024:]) < 4e-3
    assert relative_error(grads[0][:, -1024:], exact[0][:, 1024:]) < 6e-3
    # the gradient of the last key sums over 1,023 queries
    for a, e in zip(grads[1:], exact[1:], strict=True):
        assert relative_error(a[:, -1:], e[:, -1:]) < 8e-3
    assert all(t.isfinite().all() for t in grads)


def test_tensors_past_two_to_the_31_elements():
    T = 2**31 // (64 * 128) + 1_000
    x = inputs(1, T, HQ=64, H=64, K=128)
    assert x[0].numel() > 2**31
    out = attention(*x, window=64)
    grads = torch.autograd.grad(out.o, x, out.o.detach())
    end = [t.detach()[:, -256:, -2:].double().requires_grad_() for t in x]
    want = attention_reference(*end, window=64)
    exact = torch.autograd.grad(want.o[:, 64:], end, out.o.detach()[:, -192:, -2:].double())
    assert relative_error(out.o[:, -128:, -2:], want.o[:, -128:]) < 4e-3
    for a, e in zip(grads, exact, strict=True):
        assert relative_error(a[:, -128:, -2:], e[:, -128:]) < 6e-3


@pytest.mark.parametrize("case", ["causal", "window and sinks, grouped heads", "packed"])
def test_forward_and_backward_replay_in_a_graph(case):
    case = dict(CASES[case])
    cu = case.pop("cu_seqlens", None)
    mask = {name: case.pop(name) for name in ("window", "sinks") if name in case}
    if cu is not None:
        mask["cu_seqlens"] = torch.tensor(cu, device="cuda")
    x = inputs(K=64, **case)

    def run():
        out = attention(*x, **mask)
        return out.o, *torch.autograd.grad(out.o, x, torch.ones_like(out.o))

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
    if cu is not None:
        mask["cu_seqlens"].copy_(torch.tensor([0, 0, 10, 400, 401, 700, 1000]))
    graph.replay()
    for a, b in zip(got, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_stalls_the_stream(case):
    case = dict(case)
    cu = case.pop("cu_seqlens", None)
    mask = {name: case.pop(name) for name in ("causal", "window", "sinks") if name in case}
    if cu is not None:
        mask["cu_seqlens"] = torch.tensor(cu, device="cuda")
    if case.get("TQ") == 70:
        case["TK"] = 1000
    x, (q, k, v) = inputs(**case), inputs(3, 1, 500)
    lengths = torch.tensor([3, 400, 500], device="cuda")

    def run():
        out = attention(*x, **mask)
        merged = merge_attention([out, out])
        torch.autograd.grad((merged.o, merged.lse), x, [torch.ones_like(t) for t in merged])
        attention_decode(
            q, k[:, :1].expand(3, 500, 4, 64), v[:, :1].expand(3, 500, 4, 64), lengths, window=100, sinks=2
        )

    torch.use_deterministic_algorithms(False)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


DECODING = {
    "one token": (dict(TQ=1), {}),
    "grouped heads": (dict(TQ=1, HQ=16, H=2, K=128), {}),
    "a few tokens": (dict(TQ=5, HQ=8, H=2), {}),
    "many rows a key head": (dict(TQ=9, HQ=16, H=1, K=128), dict(window=1000)),
    "window": (dict(TQ=1, K=128), dict(window=1024)),
    "window and sinks": (dict(TQ=2, HQ=8, H=2), dict(window=100, sinks=70)),
    "wide heads": (dict(TQ=1, K=256), {}),
    "unequal heads": (dict(TQ=1, K=128, V=64), {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("sizes", "mask"), DECODING.values(), ids=DECODING)
@pytest.mark.parametrize("B", [1, 40])
def test_decoding_answers_to_float64(B, sizes, mask, dtype):
    q, k, v = (t.detach() for t in inputs(B=B, TK=3000, dtype=dtype, **sizes))
    lengths = torch.randint(0, 3001, (B,), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    lengths[0] = 3000
    lengths[B // 2 + 1 :: 7] = 1
    positions = torch.arange(3000, device="cuda")
    for t in (k, v):
        t.masked_fill_((positions >= lengths[:, None])[..., None, None], float("nan"))
    got = attention_decode(q, k, v, lengths, **mask)
    clean = [t.nan_to_num(0) for t in (k, v)]
    exact = attention_decode(q.double(), *(t.double() for t in clean), lengths, **mask, impl="reference")
    baseline = attention_decode(q, *clean, lengths, **mask, impl="reference")
    blind = exact.lse.isneginf()
    assert (got.lse.isneginf() == blind).all()
    assert_within("o", got.o, exact.o, baseline.o)
    assert_within("lse", *(t.lse.masked_fill(blind, 0) for t in (got, exact, baseline)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("page", "TQ", "HQ", "K", "V"), [(64, 1, 12, 64, 128), (128, 1, 6, 128, 128), (192, 3, 12, 64, 64)]
)
@pytest.mark.parametrize("B", [1, 20])
def test_decoding_from_pages_answers_to_float64(B, page, TQ, HQ, K, V, dtype):
    H, columns = 6, 3072 // page
    P, generator = H * columns + 1, torch.Generator("cuda").manual_seed(2)
    q = torch.randn(B, TQ, HQ, K, device="cuda", dtype=dtype, generator=generator)
    k, v = (torch.randn(B, P, page, n, device="cuda", dtype=dtype, generator=generator) for n in (K, V))
    table = torch.rand(B, P, device="cuda", generator=generator).argsort(1)[:, :-1].view(B, H, columns).int()
    lengths = torch.randint(0, 3073, (B, H), device="cuda", generator=generator)
    lengths[:, 0], lengths[0, 1:3] = 3072, 0
    used = torch.arange(3072, device="cuda") < lengths.unsqueeze(-1)
    owned = torch.zeros(B, P, page, dtype=torch.bool, device="cuda")
    owned[torch.arange(B, device="cuda").view(B, 1, 1), table.long()] = used.view(B, H, columns, page)
    clean = [x.masked_fill(~owned.unsqueeze(-1), 0) for x in (k, v)]
    for x in (k, v):
        x.masked_fill_(~owned.unsqueeze(-1), float("nan"))
    got = paged_attention_decode(q, k, v, table.masked_fill(~used[..., ::page], 1 << 30), lengths)
    exact = paged_attention_decode(q.double(), *(x.double() for x in clean), table, lengths, impl="reference")
    baseline = paged_attention_decode(q, *clean, table, lengths, impl="reference")
    blind = exact.lse.isneginf()
    assert (got.lse.isneginf() == blind).all()
    assert_within("o", got.o, exact.o, baseline.o)
    assert_within("lse", *(x.lse.masked_fill(blind, 0) for x in (got, exact, baseline)))


def test_decoding_replays_in_a_graph_with_other_lengths():
    q, k, v = (t.detach() for t in inputs(4, 1, 2000, HQ=8, H=2))
    lengths = torch.tensor([5, 100, 2000, 1], device="cuda")
    attention_decode(q, k, v, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention_decode(q, k, v, lengths)
    lengths.copy_(torch.tensor([1999, 0, 77, 1024]))
    graph.replay()
    torch.testing.assert_close(got, attention_decode(q, k, v, lengths), rtol=0, atol=0)


def test_operators_keep_torchs_rules():
    torch.use_deterministic_algorithms(False)
    for impl, window in (("triton", 20), ("sdpa", None)):
        q, k, v = inputs(1, 128)
        options = (None, True, window, 0, 0.5, impl)
        torch.library.opcheck(attention_op, (q, k, v, *options))
        o, lse = (t.detach() for t in attention_op(q, k, v, *options))
        q, k, v = (t.detach() for t in (q, k, v))
        torch.library.opcheck(attention_backward_op, (q, k, v, *options, o, lse, o, None))
    lengths = torch.tensor([100], device="cuda")
    torch.library.opcheck(attention_decode_op, (q[:, :1], k, v, lengths, None, 0, 0.5, "triton"))


def test_compiles_into_one_graph():
    torch.use_deterministic_algorithms(False)

    def loss(q, k, v):
        plain, far = attention(q, k, v), attention(q, k, v, window=100, sinks=2)
        return merge_attention([plain, far]).o.float().square().mean() + plain.lse.mean()

    x = inputs(1, 512)
    got, want = torch.compile(loss, fullgraph=True)(*x), loss(*x)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    for a, b in zip(torch.autograd.grad(got, x), torch.autograd.grad(want, x), strict=True):
        assert relative_error(a, b) < 1e-2


@pytest.mark.parametrize("through_lse", [False, True], ids=["o alone", "o and lse"])
@pytest.mark.parametrize("K", [64, 128])
def test_other_gradients_behind_our_outputs_answer_to_float64(K, through_lse):
    answers_to_float64(dict(TQ=2048, HQ=8, H=2), torch.bfloat16, None, K, through_lse=through_lse)


def test_plain_causal_runs_on_torchs_kernels_where_gluon_does_not():
    assert choose_impl(Call("cuda", torch.bfloat16, 4096, 4096, 128, 128, Mask(True, None, 0))) == "sdpa"
    large = Call("cuda", torch.bfloat16, 4096, 4096, 128, 128, Mask(True, None, 0), heads=128, query_heads=128)
    assert choose_impl(large) == ("flash_attn" if on_hopper() and flash_attention() == 4 else "sdpa")


@pytest.fixture
def small_blocks(monkeypatch):
    """Limit a block's shared memory to that of an RTX 4090, and forget kernels that were compiled for more."""
    monkeypatch.setattr(fit, "shared_memory", lambda: 101_376)
    for kernel in gc.get_objects():
        if isinstance(kernel, launcher._Launcher):
            monkeypatch.setattr(kernel, "_loaded", {})
            monkeypatch.setattr(kernel, "_fitted", {})
    invalidate()
    yield
    invalidate()


@pytest.mark.parametrize("case", ["causal", "window and sinks, grouped heads", "packed"])
def test_heads_of_256_run_in_the_shared_memory_of_smaller_chips(case, small_blocks):
    answers_to_float64(CASES[case], torch.bfloat16, "triton", 256)
    assert all(options["num_stages"] == 1 for _, options in forward._attention_forward._fitted.values())
