"""Attention on any device: reference, torch's CPU kernels, Triton kernels in the interpreter, merging, decoding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tokenmix_core import tuning
from tokenmix_core.ops import attention, attention_decode, merge_attention
from tokenmix_core.ops.common import AttentionOutput, interpreting
from tokenmix_core.ops.softmax_attention import attention_reference, backends, choose_impl
from tokenmix_core.ops.softmax_attention.autograd import attention_backward_op, attention_decode_op, attention_op
from tokenmix_core.ops.softmax_attention.backends import Call, Mask, limit
from tokenmix_core.testing.closeness import assert_within, relative_error

NEG_INF = float("-inf")


def inputs(B=1, TQ=20, TK=None, HQ=2, H=1, K=16, V=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, TQ, HQ, K), (B, TK or TQ, H, K), (B, TK or TQ, H, V or K)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def upstream(out: AttentionOutput, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in out)


def by_definition(q, k, v, causal=True, window=None, sinks=0, scale=None):
    """The equations of the docstring, one query at a time."""
    (B, TQ, HQ, K), (TK, H) = q.shape, k.shape[1:3]
    o, lse = q.new_zeros(B, TQ, HQ, v.shape[-1]), q.new_full((B, TQ, HQ), NEG_INF)
    for b, i, h in itertools.product(range(B), range(TQ), range(HQ)):
        at = i + TK - TQ
        seen = [
            j for j in range(TK)
            if (not causal or j <= at) and (window is None or at - window < j or j < sinks)
        ]  # fmt: skip
        if seen:
            scores = (K**-0.5 if scale is None else scale) * (k[b, seen, h * H // HQ] @ q[b, i, h])
            lse[b, i, h] = scores.logsumexp(0)
            o[b, i, h] = scores.softmax(0) @ v[b, seen, h * H // HQ]
    return AttentionOutput(o, lse)


MASKS = {
    "causal": {},
    "bidirectional": dict(causal=False),
    "window": dict(window=7),
    "window and sinks": dict(window=7, sinks=3),
    "more sinks than the window holds": dict(window=2, sinks=9),
    "window of one": dict(window=1),
    "scale": dict(scale=0.7),
}
LENGTHS = {"square": (20, 20), "fewer queries": (5, 20), "fewer keys": (20, 13), "one query": (1, 20), "one": (1, 1)}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_reference_is_the_definition(mask, lengths):
    q, k, v = inputs(2, *lengths, HQ=4, H=2, K=4, V=3)
    for got, want in zip(attention_reference(q, k, v, **mask), by_definition(q, k, v, **mask), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_reference_derivative_is_that_of_its_values():
    q, k, v = inputs(TQ=6, TK=5, K=3, V=2)

    def seen_rows(q, k, v):
        o, lse = attention_reference(q, k, v, window=3, sinks=1)
        return o, lse[:, 1:]

    assert torch.autograd.gradcheck(seen_rows, (q, k, v))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_default_on_a_cpu_is_the_reference_in_value_and_gradient(mask, lengths):
    x = inputs(2, *lengths, HQ=4, H=2, K=4)
    want = attention_reference(*x, **mask)
    do, dlse = upstream(want)
    for impl in (None, "reference"):
        got = attention(*x, **mask, impl=impl)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for outputs, grads in (((0, 1), (do, dlse)), ((0,), (do,)), ((1,), (dlse,))):
            pair = [
                torch.autograd.grad([out[i] for i in outputs], x, grads, retain_graph=True, allow_unused=True)
                for out in (got, want)
            ]
            for a, b in zip(*pair, strict=True):
                torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("mask", [{}, dict(causal=False), dict(window=4, sinks=2)], ids=str)
def test_packed_sequences_are_separate_ones(mask, impl):
    x = inputs(TQ=17)
    cu = torch.tensor([0, 5, 5, 6, 17])
    whole = attention(*x, **mask, cu_seqlens=cu, impl=impl)
    parts = [attention(*(t[:, a:b] for t in x), **mask) for a, b in ((0, 5), (5, 6), (6, 17))]
    want = AttentionOutput(*(torch.cat(t, 1) for t in zip(*parts, strict=True)))
    torch.testing.assert_close(whole, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(out, x, upstream(want)) for out in (whole, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_query_that_sees_no_key_gives_zero_and_passes_nothing(impl, device):
    x = [t.detach().float().to(device).requires_grad_() for t in inputs(TQ=20, TK=13)]
    out = attention(*x, impl=impl)
    assert (out.o[:, :7] == 0).all()
    assert (out.lse[:, :7] == NEG_INF).all()
    grads = torch.autograd.grad(out, x, [t.to(device) for t in upstream(out)])
    assert (grads[0][:, :7] == 0).all()
    assert all(t.isfinite().all() for t in grads)
    empty = attention(x[0], x[1][:, :0], x[2][:, :0], impl=impl)
    assert (empty.o == 0).all()
    assert (empty.lse == NEG_INF).all()


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 x 32 and poisoned memory: many tiles in a short sequence, and nothing read that was not written."""
    monkeypatch.setattr(tuning, "attention", lambda kernel, head, dtype: tuning.AttentionTile(16, 32, 4, 1))
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: 6)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


KERNEL_CASES = {
    "causal": dict(TQ=70, B=2),
    "bidirectional": dict(TQ=40, TK=70, causal=False),
    "window": dict(TQ=70, window=37),
    "window and sinks": dict(TQ=70, window=20, sinks=37, HQ=4, H=2),
    "fewer queries": dict(TQ=33, TK=97, window=40, sinks=3),
    "fewer keys": dict(TQ=70, TK=33),
    "one query": dict(TQ=1, TK=70, B=2),
    "one query, two keys": dict(TQ=1, TK=2),
    "K and V differ, neither a power of two": dict(TQ=33, K=24, V=40),
    "packed": dict(TQ=70, cu_seqlens=[0, 3, 3, 40, 70]),
    "packed, window and sinks": dict(TQ=70, window=10, sinks=3, cu_seqlens=[0, 50, 55, 70]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_kernels_answer_to_the_reference(case, dtype, device, small_tiles):
    mask = {name: case[name] for name in ("causal", "window", "sinks") if name in case}
    sizes = {name: case[name] for name in ("B", "TQ", "TK", "HQ", "H", "K", "V") if name in case}
    if "cu_seqlens" in case:
        mask["cu_seqlens"] = torch.tensor(case["cu_seqlens"], device=device)
    x = [t.detach().to(device).requires_grad_() for t in inputs(dtype=dtype, **sizes)]

    def run(forward, inputs):
        out = forward(*inputs, **mask)
        grads = torch.autograd.grad(out, inputs, [g.to(y) for g, y in zip(up, out, strict=True)])
        return [t.masked_fill(blind, 0) if t.shape == blind.shape else t for t in (*out, *grads)]

    wide = [t.detach().double().requires_grad_() for t in x]
    exact_out = attention_reference(*wide, **mask)
    blind, up = exact_out.lse == NEG_INF, upstream(exact_out)
    exact, baseline = run(attention_reference, wide), run(attention_reference, x)
    got = run(lambda *a, **kw: attention(*a, **kw, impl="triton"), x)
    assert ((attention(*x, **mask, impl="triton").lse == NEG_INF) == blind).all()
    for name, a, e, b in zip(("o", "lse", "dq", "dk", "dv"), got, exact, baseline, strict=True):
        assert_within(name, a, e, b, floor=2 * torch.finfo(a.dtype).eps)


@pytest.mark.parametrize("mask", [Mask(True, None, 0), Mask(True, 7, 3), Mask(False, None, 0)], ids=str)
@pytest.mark.parametrize("cu", [None, [0, 9, 9, 60]], ids=["whole", "packed"])
def test_kernels_answer_selected_queries_alone(mask, cu, device, small_tiles):
    from tokenmix_core.ops.softmax_attention.backward import attention_backward
    from tokenmix_core.ops.softmax_attention.forward import attention_forward

    q, k, v = (x.detach().to(device, torch.float32) for x in inputs(TQ=60))
    selected = (torch.arange(60, device=device) // 11 % 3 == 1)[None]
    cu = cu and torch.tensor(cu, device=device, dtype=torch.int32)
    o, lse = attention_forward(q, k, v, cu, mask, 0.25, selected)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    options = {"scale": 0.25, "cu_seqlens": cu, **mask._asdict()}
    exact = attention_reference(*leaves, **options).o * selected[..., None, None]
    assert (lse.isposinf() == ~selected[:, None]).all()
    assert relative_error(o, exact) < 1e-6
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(device)
    grads = attention_backward(q, k, v, o, lse, do, None, cu, mask, 0.25, selected)
    for name, got, wanted in zip("qkv", grads, torch.autograd.grad(exact, leaves, do.double()), strict=True):
        assert relative_error(got, wanted) < 1e-6, name


def test_kernels_take_views_of_one_projection(device, small_tiles):
    qkv = torch.randn(2, 40, 3, 2, 16, device=device, requires_grad=True)
    got, want = (attention(*qkv.unbind(2), window=9, impl=impl) for impl in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    up = [g.to(device).float() for g in upstream(want)]
    a, b = (torch.autograd.grad(out, qkv, up)[0] for out in (got, want))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_merging_parts_gives_attention_over_all_keys():
    q, k, v = inputs(2, 12, HQ=4, H=2)
    want = attention_reference(q, k, v, causal=False)
    parts = [attention(q, k[:, a:b], v[:, a:b], causal=False) for a, b in ((0, 3), (3, 4), (4, 12))]
    blind = AttentionOutput(torch.zeros_like(want.o), torch.full_like(want.lse, NEG_INF))
    got = merge_attention([blind, *parts])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), upstream(want)) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_merging_parts_that_saw_nothing_sees_nothing():
    o, lse = torch.zeros(1, 2, 1, 3, requires_grad=True), torch.full((1, 2, 1), NEG_INF, requires_grad=True)
    merged = merge_attention([AttentionOutput(o, lse)] * 2)
    assert (merged.o == 0).all()
    assert (merged.lse == NEG_INF).all()
    grads = torch.autograd.grad(merged.o.sum() + merged.lse.sum(), (o, lse))
    assert all((g == 0).all() for g in grads)


def test_merging_is_differentiable_in_o_and_lse():
    o, lse = torch.randn(2, 1, 3, 1, 2, dtype=torch.float64), torch.randn(2, 1, 3, 1, dtype=torch.float64)

    def merge(o, lse):
        return merge_attention([AttentionOutput(*part) for part in zip(o, lse, strict=True)])

    assert torch.autograd.gradcheck(merge, (o.requires_grad_(), lse.requires_grad_()))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("TQ", [1, 3, 40])
@pytest.mark.parametrize("mask", [{}, dict(window=40, sinks=5), dict(window=7, sinks=40)], ids=str)
def test_decoding_is_attention_of_the_last_tokens(mask, TQ, impl, device, small_tiles):
    q, k, v = (t.detach().float().to(device) for t in inputs(4, TQ, 150, HQ=4, H=2, V=24))
    # of any stride
    lengths = torch.tensor([150, 2, 90, 0], dtype=torch.int32, device=device).repeat_interleave(2)[::2]
    for b, n in enumerate(lengths.tolist()):
        k[b, n:] = v[b, n:] = float("nan")
    got = attention_decode(q, k, v, lengths, **mask, impl=impl)
    for b, n in enumerate(lengths.tolist()):
        x = [t[b : b + 1].double() for t in (q, k[:, :n], v[:, :n])]
        want = attention_reference(*x, **mask)
        torch.testing.assert_close(got.o[b], want.o[0].float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.lse[b], want.lse[0].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", [None, "reference"])
def test_compiles_into_one_graph(impl):
    def loss(q, k, v):
        plain, far = attention(q, k, v, impl=impl), attention(q, k, v, window=5, sinks=1, impl=impl)
        step = attention_decode(q[:, -1:], k, v, torch.full((2,), 20, dtype=torch.int32))
        return merge_attention([plain, far]).o.square().sum() + plain.lse.sum() + step.o.detach().sum()

    x = inputs(2)
    want = loss(*x)
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(*x)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, x), torch.autograd.grad(want, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_operators_keep_torchs_rules(impl):
    q, k, v = inputs(TQ=5)
    options = (None, True, None, 0, 0.5, impl)
    torch.library.opcheck(attention_op, (q, k, v, *options))
    o, lse = (t.detach() for t in attention_op(q, k, v, *options))
    q, k, v = (t.detach() for t in (q, k, v))
    torch.library.opcheck(attention_backward_op, (q, k, v, o, lse, o, None, *options))
    torch.library.opcheck(attention_decode_op, (q, k, v, torch.tensor([5]), None, 0, 0.5, "reference"))


def test_choice_follows_its_rule(monkeypatch):
    monkeypatch.setattr(backends, "cudnn_heads", lambda: 0)

    def choice(device="cuda", dtype=torch.bfloat16, tq=4096, tk=4096, k=128, v=128, packed=False, heads=None, **mask):
        mask = Mask(**{**Mask(True, None, 0)._asdict(), **mask})
        return choose_impl(Call(device, dtype, tq, tk, k, v, mask, packed, heads))

    assert choice() == "sdpa"
    assert choice(causal=False, tq=512) == "sdpa"
    assert choice(k=256, v=256) == choice(tq=512, tk=512, heads=17) == choice(tq=512, tk=512) == "sdpa"
    assert choice(tq=512, tk=512, heads=16) == choice(tq=512, tk=512, heads=16, causal=False) == "triton"
    assert choice(tq=512, tk=512, heads=16, k=256, v=256) == "sdpa"
    assert choice(tq=512) == choice(window=64) == choice(window=64, sinks=4) == choice(packed=True) == "triton"
    assert choice(tq=64, tk=64) == choice(dtype=torch.float32) == choice(k=64) == choice(tq=8192) == "triton"
    assert choice(k=512, v=512) == choice(dtype=torch.float64) == "reference"
    monkeypatch.setattr(backends, "cudnn_heads", lambda: 128)
    assert choice(k=64) == choice(v=64) == "sdpa"
    assert choice(v=256) == choice(k=60) == choice(k=64, window=64) == choice(k=64, dtype=torch.float32) == "triton"
    assert choice("cpu") == choice("cpu", dtype=torch.float64) == choice("cpu", packed=True) == "sdpa"
    assert choice("cpu", tq=1) == choice("cpu", tq=64, window=64) == "sdpa"
    assert choice("cpu", tq=4097, window=64) == choice("cpu", tq=8192) == choice("cpu", k=64) == "reference"


def test_limits_name_the_way_out(monkeypatch):
    monkeypatch.setattr(backends, "cudnn_heads", lambda: 0)

    def why(impl, device="cuda", dtype=torch.bfloat16, tq=64, tk=64, k=64, v=64, **mask):
        return limit(impl, Call(device, dtype, tq, tk, k, v, Mask(**{**Mask(True, None, 0)._asdict(), **mask})))

    assert why("triton") is why("sdpa") is why("reference", k=999) is None
    for text in (
        why("triton", k=257), why("triton", dtype=torch.float64), why("sdpa", dtype=torch.float32), why("sdpa", v=128),
        why("sdpa", k=60, v=60), why("sdpa", window=4, sinks=1), why("sdpa", tq=65), why("sdpa", "cpu", tq=65),
        why("sdpa", "cpu", v=128), why("flash_attn", "cpu"), why("triton", "cpu"),
    ):  # fmt: skip
        assert text is not None
        assert "; pass impl=" in text


def test_flash_attention_4_alone_is_not_taken_for_flash_attn_2(tmp_path, monkeypatch):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    call = Call("cuda", torch.bfloat16, 64, 64, 64, 64, Mask(True, None, 0))
    monkeypatch.setattr(backends, "_oldest", lambda: (8, 0))
    assert "or flash-attn (2), neither of which is here" in (limit("flash_attn", call) or "")


GOOD = dict(TQ=6, TK=6, HQ=2, H=1, K=4)
BAD_CALLS = {
    "q is no tensor": (dict(q=[1.0]), "q must be a tensor"),
    "no v": (dict(v=None), "v must be a tensor of shape .* got None"),
    "q of three dimensions": (dict(q=torch.zeros(1, 6, 4)), "q must have shape"),
    "k of another head size": (dict(k=torch.zeros(1, 6, 1, 5)), "k must have shape .*K=4"),
    "v of another length": (dict(v=torch.zeros(1, 5, 1, 4)), "v must have shape .*TK=6"),
    "another batch": (dict(k=torch.zeros(2, 6, 1, 4)), "B=1"),
    "heads that do not divide": (
        dict(q=torch.zeros(1, 6, 3, 4), k=torch.zeros(1, 6, 2, 4), v=torch.zeros(1, 6, 2, 4)), "HQ=3 and H=2"
    ),
    "integers": (dict(q=torch.zeros(1, 6, 2, 4, dtype=torch.int64)), "q must be bfloat16"),
    "mixed dtypes": (dict(k=torch.zeros(1, 6, 1, 4, dtype=torch.float64)), "share one dtype"),
    "window of zero": (dict(window=0), "window must be None or an integer of at least 1, got 0"),
    "window of a float": (dict(window=2.0), "window must be"),
    "window, both ways": (dict(window=2, causal=False), "a window needs causal=True"),
    "negative sinks": (dict(window=2, sinks=-1), "sinks must be an integer of at least 0, got -1"),
    "negative scale": (dict(scale=-1.0), "scale must be positive"),
    "scale of NaN": (dict(scale=math.nan), "scale must be a finite number, got nan"),
    "infinite scale": (dict(scale=math.inf), "scale must be a finite number, got inf"),
    "scale in words": (dict(scale="half"), "scale must be a finite number, got 'half'"),
    "unknown impl": (dict(impl="cuda"), "None or one of 'gluon', 'triton', 'sdpa', .*, got 'cuda'"),
    "flash-attn on a CPU": (dict(impl="flash_attn"), "flash_attn.*needs CUDA"),
    "torch's kernel with fewer keys": (
        dict(q=torch.zeros(1, 7, 2, 4), impl="sdpa"), "sdpa.*at least as many keys as queries .*, got 6 and 7"
    ),
    "borders past the end": (dict(cu_seqlens=torch.tensor([0, 7])), "T = 6"),
    "borders that fall": (dict(cu_seqlens=torch.tensor([0, 4, 2, 6])), "without falling"),
    "borders of floats": (dict(cu_seqlens=torch.tensor([0.0, 6.0])), "int32 or int64"),
    "borders beside fewer queries": (
        dict(q=torch.zeros(1, 5, 2, 4), cu_seqlens=torch.tensor([0, 5])), "as many queries as keys"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_says_what_was_expected(change, message):
    q, k, v = (t.detach().float() for t in inputs(**GOOD))
    arguments = dict(q=q, k=k, v=v) | change
    with pytest.raises(ValueError, match=message):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_a_bad_decoding_or_merging_call_says_what_was_expected():
    q, k, v = (t.detach().float() for t in inputs(2, 1, 8))
    lengths = torch.tensor([3, 8])
    for change, message in (
        (dict(cache_seqlens=lengths.float()), "cache_seqlens must be int32, int64"),
        (dict(cache_seqlens=torch.tensor([3, 9])), "between 0 and S = 8"),
        (dict(cache_seqlens=lengths[:1]), "cache_seqlens must have shape"),
        (dict(impl="sdpa"), "None, 'triton' or 'reference', got 'sdpa'"),
        (dict(window=0), "window must be"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_decode(q, k, v, **(dict(cache_seqlens=lengths) | change))
    out = attention(q, k, v)
    for parts, message in (([], "at least one"), ([out, AttentionOutput(out.o[:1], out.lse[:1])], "B=2")):
        with pytest.raises(ValueError, match=message):
            merge_attention(parts)


@pytest.mark.skipif(not interpreting(), reason="about the interpreter")
def test_the_interpreter_refuses_bfloat16():
    q, k, v = (t.detach() for t in inputs(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="interpreter, got bfloat16"):
        attention(q, k, v, impl="triton")


def test_reference_in_blocks_is_the_reference_at_once(monkeypatch):
    from tokenmix_core.ops.softmax_attention import reference

    x = inputs(TQ=70, TK=80)
    want = attention_reference(*x, window=30, sinks=4)
    monkeypatch.setattr(reference, "_BLOCK_SCORES", 1)
    assert relative_error(attention_reference(*x, window=30, sinks=4).o, want.o) < 1e-15
