"""Test the contracts of attention, of decoding and of merging, and the selection of attention, on any device."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from tokenmix_core.kernels import tuning
from tokenmix_core.ops import attention, attention_decode, merge_attention, paged_attention_decode
from tokenmix_core.ops.dispatch import interpreting
from tokenmix_core.ops.softmax_attention import attention_reference, backends, backward, choose_impl, forward
from tokenmix_core.ops.softmax_attention import tuning as attention_tuning
from tokenmix_core.ops.softmax_attention.autograd import (
    attention_backward_op,
    attention_decode_op,
    attention_op,
    paged_attention_decode_op,
)
from tokenmix_core.ops.softmax_attention.backends import limit
from tokenmix_core.ops.softmax_attention.types import Call as Choice
from tokenmix_core.ops.softmax_attention.types import Mask
from tokenmix_core.ops.types import AttentionOutput
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.operations import HALF, Call, KernelCase, OpContract

NEG_INF = float("-inf")


def inputs(B=1, TQ=20, TK=None, HQ=2, H=1, K=16, V=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, TQ, HQ, K), (B, TK or TQ, H, K), (B, TK or TQ, H, V or K)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def upstream(out: AttentionOutput, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in out)


def drawn(dtype, device, seed=0, **sizes):
    """Return random q, k and v by name."""
    return {name: x.detach().to(device) for name, x in zip("qkv", inputs(**sizes, dtype=dtype, seed=seed), strict=True)}


def by_definition(q, k, v, causal=True, window=None, sinks=0, scale=None):
    """Compute the equations of the docstring, one query at a time."""
    (B, TQ, HQ, K), (TK, H) = q.shape, k.shape[1:3]
    k, v = (x.repeat_interleave(HQ // H, 2) for x in (k, v))
    positions, o, lse = torch.arange(TK), [], []
    for i in range(TQ):
        at = i + TK - TQ
        seen = positions <= at if causal else positions >= 0
        if window is not None:
            seen &= (positions > at - window) | (positions < sinks)
        if not seen.any():
            o.append(q.new_zeros(B, HQ, v.shape[3]))
            lse.append(q.new_full((B, HQ), NEG_INF))
            continue
        scores = (K**-0.5 if scale is None else scale) * torch.einsum("bhk,bjhk->bhj", q[:, i], k[:, seen])
        lse.append(scores.logsumexp(2))
        o.append(torch.einsum("bhj,bjhv->bhv", scores.softmax(2), v[:, seen]))
    return AttentionOutput(torch.stack(o, 1), torch.stack(lse, 1))


def finite(output):
    """Return results by name; replace the log-sum-exp of a query that sees no key by 0."""
    return {"o": output.o, "lse": output.lse.masked_fill(output.lse == NEG_INF, 0)}


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


def in_small_tiles(override):
    """Select tiles of 16 x 32, so that a short sequence has many tiles."""
    override(attention_tuning, attention=lambda *call: attention_tuning.AttentionTile(16, 32, 4, 1))
    override(tuning, sm_count=lambda device: 6)


@pytest.fixture
def small_tiles(override):
    in_small_tiles(override)


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


class TestAttention(OpContract):
    covers = (attention,)
    absent: ClassVar = {"step": "a token is decoded by attention_decode", "malformed_steps": "no steps"}
    forms: ClassVar = {"attention": attention}
    eager = (None, "reference")
    tokens = ("q", "k", "v")
    past = ("k", "v")
    cases: ClassVar = {
        f"{mask}, {lengths}": dict(B=2, TQ=TQ, TK=TK, HQ=4, H=2, K=4, V=3, **options)
        for mask, options in MASKS.items()
        for lengths, (TQ, TK) in LENGTHS.items()
    }
    lengths = (1, 2, 127, 129)
    kernels: ClassVar = {
        name: KernelCase(sizes, patch=in_small_tiles)
        for name, sizes in {
            "causal": dict(T=70, B=2),
            "bidirectional": dict(TQ=40, TK=70, causal=False),
            "window": dict(T=70, window=37),
            "window and sinks": dict(T=70, window=20, sinks=37, HQ=4, H=2),
            "fewer queries": dict(TQ=33, TK=97, window=40, sinks=3),
            "fewer keys": dict(TQ=70, TK=33),
            "one query": dict(TQ=1, TK=70, B=2),
            "one query, two keys": dict(TQ=1, TK=2),
            "K and V differ, neither a power of two": dict(T=33, K=24, V=40),
            "packed": dict(boundaries=[0, 3, 3, 40, 70]),
            "packed, window and sinks": dict(window=10, sinks=3, boundaries=[0, 50, 55, 70]),
        }.items()
    }
    parts: ClassVar = {mask: dict(T=20, **MASKS[mask]) for mask in ("causal", "window and sinks")}
    packed: ClassVar = {
        mask: dict(boundaries=[0, 5, 5, 6, 17], **MASKS[mask])
        for mask in ("causal", "bidirectional", "more sinks than the window holds")
    }
    neighbours: ClassVar = dict(B=3, T=5, window=3, sinks=1)
    on_gpu: ClassVar = {
        f"heads of {K}{name}": dict(B=2, T=300, HQ=4, H=2, K=K, **mask)
        for K in (64, 128)
        for name, mask in (("", {}), (", a window", dict(window=100)))
    }
    impls = (None, "gluon", "sdpa", "flash_attn")
    traced: ClassVar = dict(B=2, window=3, sinks=1)
    # a window of all keys counts as none, and makes another graph
    traced_lengths = (5, 9)
    replayed: ClassVar = dict(T=5)
    valid: ClassVar = dict(T=6, HQ=2, H=1, K=4)
    malformed: ClassVar = {
        "q is no tensor": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
        "no v": ({"v": None}, "v must be a tensor of shape .* got None"),
        "q of three dimensions": ({"q": z(1, 6, 4)}, "q must have shape"),
        "k of another head size": ({"k": z(1, 6, 1, 5)}, "k must have shape .*K=4"),
        "v of another length": ({"v": z(1, 5, 1, 4)}, r"v must have shape .*TK=6.*, got \[1, 5, 1, 4\]"),
        "another batch": ({"k": z(2, 6, 1, 4)}, "B=1"),
        "heads that do not divide": ({"q": z(1, 6, 3, 4)} | dict.fromkeys("kv", z(1, 6, 2, 4)), "HQ=3 and H=2"),
        "integers": ({"q": z(1, 6, 2, 4, dtype=torch.int64)}, "q must be bfloat16"),
        "mixed dtypes": ({"k": z(1, 6, 1, 4, dtype=torch.float64)}, "share one dtype"),
        "window of zero": ({"window": 0}, "window must be None or an integer of at least 1, got 0"),
        "window of a float": ({"window": 2.5}, "window must be .*got 2.5"),
        "window, both ways": ({"window": 2, "causal": False}, "a window needs causal=True, got window=2"),
        "negative sinks": ({"window": 2, "sinks": -1}, "sinks must be an integer of at least 0, got -1"),
        "negative scale": ({"scale": -1.0}, "scale must be positive, got -1.0"),
        "scale of NaN": ({"scale": math.nan}, "scale must be a finite number, got nan"),
        "infinite scale": ({"scale": math.inf}, "scale must be a finite number, got inf"),
        "scale in words": ({"scale": "half"}, "scale must be a finite number, got 'half'"),
        "unknown impl": ({"impl": "cuda"}, "None or one of 'gluon', 'triton', 'sdpa', .*, got 'cuda'"),
        "flash-attn on a CPU": ({"impl": "flash_attn"}, "flash_attn.*needs CUDA"),
        "torch's kernel with fewer keys": (
            {"q": z(1, 7, 2, 4), "impl": "sdpa"}, "sdpa.*at least as many keys as queries .*, got 6 and 7"
        ),
        "boundaries in a list": ({"cu_seqlens": [0, 6]}, r"cu_seqlens must be a tensor of shape \[.*\], got list"),
        "boundaries past the end": ({"cu_seqlens": torch.tensor([0, 7])}, "T = 6"),
        "boundaries that fall": ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, "without falling"),
        "boundaries of floats": ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "int32 or int64"),
        "boundaries beside fewer queries": (
            {"q": z(1, 5, 2, 4), "cu_seqlens": torch.tensor([0, 5])}, "as many queries as keys"
        ),
    }  # fmt: skip
    results = staticmethod(finite)

    def make(
        self, dtype=torch.float64, device="cpu", seed=0, T=20, TQ=None, TK=None, boundaries=None, causal=True,
        window=None, sinks=0, scale=None, **sizes,
    ) -> Call:  # fmt: skip
        options = {"causal": causal, "window": window, "sinks": sinks, "scale": scale}
        if boundaries is not None:
            options["cu_seqlens"], T = torch.tensor(boundaries, device=device), boundaries[-1]
        return Call(drawn(dtype, device, seed, TQ=TQ or T, TK=TK or T, **sizes), options)

    def definition(self, q, k, v, **options):
        return by_definition(q, k, v, **options)

    def floor(self, name, eps):
        # dk of one query: 2.9 units were measured in float32 (AVX2, AVX-512), 1.4 in the reference's order
        return (3 if eps < 1e-5 else 2) * eps

    def operators(self, device):
        q, k, v = (x.to(device).requires_grad_() for x in drawn(torch.float64, device, TQ=5).values())
        # torch's own attention supports float64 only on a CPU
        for impl in ("sdpa", "reference") if q.device.type == "cpu" else ("reference",):
            options = (None, True, None, 0, 0.5, impl)
            yield attention_op, (q, k, v, *options)
            o, lse = (x.detach() for x in attention_op(q, k, v, *options))
            yield attention_backward_op, (*(x.detach() for x in (q, k, v)), *options, o, lse, o, None)


def by_decoding(cache_seqlens, **options):
    return attention_decode(cache_seqlens=cache_seqlens.clone(), **options)


class TestDecoding(OpContract):
    covers = (attention_decode,)
    absent: ClassVar = {
        "parts": "it is itself a part of attention",
        "step": "it is the step itself, of attention",
        "malformed_steps": "no other step",
        "packed": "rows of a cache hold a sequence each",
        "replayed": "lengths are read from the cache: tests/kernels/launch has decoding by a model",
    }
    forms: ClassVar = {"decode": by_decoding}
    impls: ClassVar = (None,)
    differentiable = False
    tokens = ("k_cache", "v_cache")
    cases: ClassVar = {
        f"{TQ} queries{name}": dict(TQ=TQ, **mask)
        for TQ in (1, 3)
        for name, mask in (("", {}), (", a window", dict(window=9, sinks=3)))
    }
    lengths = (2, 33, 64, 65)
    kernels: ClassVar = {
        f"{TQ} queries{name}": KernelCase(dict(TQ=TQ, T=150, **mask), None, in_small_tiles, ("float32",))
        for TQ in (1, 3, 40)
        for name, mask in (
            ("", {}), (", a window", dict(window=40, sinks=5)), (", sinks", dict(window=7, sinks=40)),
        )
    }  # fmt: skip
    neighbours: ClassVar = dict(B=3, TQ=1)
    traced: ClassVar = dict(TQ=1)
    traced_lengths = (13, 17)
    valid: ClassVar = dict(T=9)
    malformed: ClassVar = {
        "lengths of floats": ({"cache_seqlens": torch.tensor([3.0] * 4)}, "cache_seqlens must be int32, int64"),
        "lengths beyond the cache": ({"cache_seqlens": torch.tensor([3, 9, 10, 0])}, "between 0 and S = 9, got"),
        "lengths of other rows": ({"cache_seqlens": torch.tensor([3])}, r"cache_seqlens must have shape \[.*got \[1\]"),
        "values of another length": ({"v_cache": z(4, 8, 2, 16)}, r"v_cache must have .*got \[4, 8, 2, 16\]"),
        "a list": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
        "torch's kernel": ({"impl": "sdpa"}, "None, 'triton' or 'reference', got 'sdpa'"),
        "a window of zero": ({"window": 0}, "window must be"),
    }
    results = staticmethod(finite)

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=4, TQ=1, T=20, window=None, sinks=0) -> Call:
        q, k, v = drawn(dtype, device, seed, B=B, TQ=TQ, TK=T, HQ=4, H=2).values()
        # lengths have any stride, and nothing beyond them is read
        lengths = torch.tensor([T, 2, T // 2, 0], dtype=torch.int32, device=device).repeat_interleave(2)[::2][:B]
        for b, n in enumerate(lengths.tolist()):
            k[b, n:] = v[b, n:] = torch.nan
        return Call({"q": q, "k_cache": k, "v_cache": v}, {"cache_seqlens": lengths, "window": window, "sinks": sinks})

    def definition(self, q, k_cache, v_cache, *, cache_seqlens, **options):
        rows = [
            by_definition(q[b : b + 1], k_cache[b : b + 1, :n], v_cache[b : b + 1, :n], **options)
            for b, n in enumerate(cache_seqlens.tolist())
        ]
        return AttentionOutput(*(torch.cat(x) for x in zip(*rows, strict=True)))

    def operators(self, device):
        q, k, v = drawn(torch.float64, device, TQ=5).values()
        yield attention_decode_op, (q, k, v, torch.tensor([5], device=device), None, 0, 0.5, "reference")


def by_pages(page_table, lengths, **options):
    return paged_attention_decode(page_table=page_table.clone(), lengths=lengths.clone(), **options)


class TestPagedDecoding(OpContract):
    covers = (paged_attention_decode,)
    absent: ClassVar = {
        **{name: TestDecoding.absent[name] for name in ("parts", "step", "malformed_steps", "replayed")},
        "packed": "each key head has a list of pages",
    }
    forms: ClassVar = {"decode": by_pages}
    impls: ClassVar = (None,)
    differentiable = False
    tokens = ("k_pages", "v_pages")
    cases: ClassVar = {f"{TQ} queries": dict(TQ=TQ) for TQ in (1, 3)}
    lengths = (2, 16, 17, 49)
    kernels: ClassVar = {
        f"{TQ} queries, pages of {page}": KernelCase(dict(TQ=TQ, page=page, T=160), None, in_small_tiles, ("float32",))
        for TQ, page in ((1, 16), (1, 96), (3, 32))
    }
    # these tests combine the table of one call, or row, with the pages of another one
    neighbours: ClassVar = dict(B=3, TQ=1, poisoned=False)
    traced: ClassVar = dict(TQ=1)
    traced_lengths = (33, 65)
    valid: ClassVar = dict(T=40)
    malformed: ClassVar = {
        "lengths beyond the pages": ({"lengths": torch.full((2, 2), 49)}, "between 0 and 48, the tokens of 3 pages"),
        "a page that does not exist": (
            {"page_table": torch.full((2, 2, 3), 9, dtype=torch.int32)}, "page_table must lie between 0 and 8 where",
        ),
        "wide entries": ({"page_table": torch.zeros(2, 2, 3, dtype=torch.int64)}, "page_table must be int32"),
        "lengths of floats": ({"lengths": torch.zeros(2, 2)}, "lengths must be int32, int64"),
        "odd pages": (
            {"k_pages": z(2, 9, 8, 16), "v_pages": z(2, 9, 8, 16)}, "a page must have a multiple of 16 tokens, got 8",
        ),
        "torch's kernel": ({"impl": "sdpa"}, "None, 'triton' or 'reference', got 'sdpa'"),
    }  # fmt: skip
    results = staticmethod(finite)

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, TQ=1, T=40, page=16, poisoned=True) -> Call:
        H, columns = 2, -(-T // page)
        P = H * columns + 3
        q, k, v = drawn(dtype, device, seed, B=B, TQ=TQ, TK=P * page, HQ=4, H=1).values()
        k, v = (x.view(B, P, page, 16).contiguous() for x in (k, v))
        lengths = torch.tensor(
            [[T, 2], [0, max(T - page, 0)], [min(T, page), T // 2]], dtype=torch.int32, device=device
        )[:B]
        generator = torch.Generator().manual_seed(seed)
        # a page belongs to one head; entries, pages and offsets outside the lists must not be read
        table = torch.stack([torch.randperm(P, generator=generator)[: H * columns] for _ in range(B)])
        table = table.view(B, H, columns).to(device, torch.int32)
        owned = torch.zeros(B, P, page, dtype=torch.bool, device=device)
        for b, h, n in ((b, h, n) for b, row in enumerate(lengths.tolist()) for h, n in enumerate(row)):
            for j in range(columns):
                owned[b, table[b, h, j], : max(0, n - j * page)] = True
            table[b, h, -(-n // page) :] = P - 1 if page == 16 else 1 << 20
        for x in (k, v) if poisoned else ():
            x.masked_fill_(~owned.unsqueeze(-1), torch.nan)
        return Call({"q": q, "k_pages": k, "v_pages": v}, {"page_table": table, "lengths": lengths})

    def definition(self, q, k_pages, v_pages, *, page_table, lengths, **options):
        B, G, page = len(q), q.shape[2] // page_table.shape[1], k_pages.shape[2]
        rows = []
        for b in range(B):
            heads = []
            for h, n in enumerate(lengths[b].tolist()):
                at = page_table[b, h, : -(-n // page)].long()
                k, v = (x[b, at].flatten(0, 1)[None, :n, None] for x in (k_pages, v_pages))
                heads.append(by_definition(q[b : b + 1, :, h * G : (h + 1) * G], k, v, **options))
            rows.append([torch.cat(x, 2) for x in zip(*heads, strict=True)])
        return AttentionOutput(*(torch.cat(x) for x in zip(*rows, strict=True)))

    def growing(self, arguments):
        yield from super().growing(arguments)
        yield arguments["page_table"], 2

    def operators(self, device):
        call = self.make(device=device, TQ=1, poisoned=False)
        yield paged_attention_decode_op, (*call.tensors.values(), *call.options.values(), 0.5, "reference")
        slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
        yield paged_attention_decode_op, (*call.tensors.values(), *call.options.values(), 0.5, "reference", slots)

    @pytest.mark.parametrize("backend", ["reference", "triton"])
    def test_a_pool_of_slots_at_any_distance(self, backend, device):
        call = self.make(torch.float32, device, B=3, TQ=2)
        expected = paged_attention_decode(**call.tensors, **call.options, impl=backend)
        slots, tensors = torch.tensor([4, 0, 3], dtype=torch.int32, device=device), dict(call.tensors)
        for name in self.tokens:
            x = tensors[name]
            pool = x.new_full((5, x[0].numel() + 48), torch.nan)
            tensors[name] = pool[:, : x[0].numel()].view(5, *x.shape[1:])
            tensors[name][slots.long()] = x
        got = paged_attention_decode(**tensors, **call.options, slots=slots, impl=backend)
        assert torch.equal(got.o, expected.o)
        assert torch.equal(got.lse, expected.lse)

    @pytest.mark.parametrize(
        ("slots", "message"),
        [
            (torch.tensor([0, 2], dtype=torch.int32), "at least 0 and less than the pool's 2 slots"),
            (torch.tensor([-1, 0], dtype=torch.int32), "at least 0 and less than the pool's 2 slots"),
            (torch.tensor([0, 1]), "slots must be int32"),
            (torch.tensor([0], dtype=torch.int32), "slots must have shape"),
        ],
        ids=["beyond the pool", "negative", "wide", "too few"],
    )
    def test_slots_that_do_not_fit_are_refused(self, slots, message):
        call = self.make(torch.float32)
        with pytest.raises(ValueError, match=message):
            paged_attention_decode(**call.tensors, **call.options, slots=slots)


def merged(first, first_lse, second, second_lse, impl=None):
    return merge_attention([AttentionOutput(first, first_lse), AttentionOutput(second, second_lse)])


class TestMerging(OpContract):
    covers = (merge_attention,)
    absent: ClassVar = {
        "kernels": "the kernel has no gradients: a test of its own",
        "lengths": "a token stands alone",
        "parts": "a token stands alone, without a state",
        "step": "a token stands alone, without a state",
        "malformed_steps": "no steps",
        "packed": "a token stands alone, in any document",
        "operators": "no custom ops",
        "replayed": "no launches of its own",
        "malformed": "it takes a list of results: another test has its errors",
    }
    forms: ClassVar = {"two parts": merged}
    tokens = ("first", "first_lse", "second", "second_lse")
    cases: ClassVar = {"two parts": {}}
    neighbours: ClassVar = dict(B=3)
    traced: ClassVar = dict(B=2)
    results = staticmethod(finite)

    def named(self, form, name):
        return f"{'lse' if 'lse' in name else 'o'}[{int('second' in name)}]"

    def make(self, dtype=torch.float64, device="cpu", seed=0, B=2, T=5) -> Call:
        (a, _, _), (b, _, _) = (inputs(B, T, dtype=dtype, seed=seed + i) for i in (0, 1))
        parts = {"first": a, "first_lse": a[..., 0], "second": b, "second_lse": b[..., 1]}
        return Call({name: x.detach().clone().to(device) for name, x in parts.items()}, {})

    def definition(self, first, first_lse, second, second_lse):
        a, b = first_lse.exp(), second_lse.exp()
        o = (a[..., None] * first + b[..., None] * second) / (a + b)[..., None]
        return AttentionOutput(o, (a + b).log())


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


@pytest.mark.operation
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("V", [16, 20])
def test_the_merging_kernel_errs_at_most_twice_as_much_as_torch(V, dtype, device):
    rng = torch.Generator().manual_seed(0)
    lses = [8 * torch.randn(2, 3, 5, generator=rng) for _ in range(3)]
    # one part sees nothing in a row, and no part sees anything in another row
    lses[0][0, 0, 0] = NEG_INF
    for lse in lses:
        lse[1, 2, 4] = NEG_INF
    parts = [AttentionOutput(torch.randn(2, 3, 5, V, generator=rng).to(device, dtype), lse.to(device)) for lse in lses]
    exact = merge_attention([AttentionOutput(o.double(), lse.double()) for o, lse in parts])
    eager, got = (merge_attention(parts, impl=impl) for impl in ("reference", "triton"))
    assert_within("o", got.o, exact.o, eager.o)
    seen = exact.lse.isfinite()
    assert_within("lse", got.lse[seen], exact.lse[seen], eager.lse[seen])
    assert (got.lse[~seen] == NEG_INF).all()
    assert (got.o[~seen] == 0).all()


def test_merging_is_seen_by_forward_mode_and_transforms():
    o, lse = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1)
    tangents = torch.randn_like(o), torch.randn_like(lse)

    def merged_by(impl):
        def run(o, lse):
            return merge_attention([AttentionOutput(o, lse), AttentionOutput(2 * o, 1 - lse)], impl=impl)

        mapped = torch.vmap(run)(o[:, None], lse[:, None])
        return torch.func.jvp(run, (o, lse), tangents), mapped

    torch.testing.assert_close(merged_by("triton"), merged_by("reference"))


def test_one_result_and_a_wide_lse_stay_what_they_are():
    o, lse = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1)
    alone = merge_attention([AttentionOutput(o, lse)], impl="triton")
    torch.testing.assert_close(alone, AttentionOutput(o, lse))
    assert alone.o is not o
    assert merge_attention([AttentionOutput(o, lse.double())] * 2, impl="triton").lse.dtype == torch.float64


def test_merging_parts_that_saw_nothing_sees_nothing():
    o, lse = torch.zeros(1, 2, 1, 3, requires_grad=True), torch.full((1, 2, 1), NEG_INF, requires_grad=True)
    merged = merge_attention([AttentionOutput(o, lse)] * 2)
    assert (merged.o == 0).all()
    assert (merged.lse == NEG_INF).all()
    grads = torch.autograd.grad(merged.o.sum() + merged.lse.sum(), (o, lse))
    assert all((g == 0).all() for g in grads)


def test_choice_follows_its_rule(monkeypatch):
    monkeypatch.setattr(backends, "cudnn_heads", lambda: 0)

    def call(
        device="cuda",
        dtype=torch.bfloat16,
        tq=4096,
        tk=4096,
        k=128,
        v=128,
        packed=False,
        heads=None,
        gluon=False,
        **mask,
    ):
        mask = Mask(**{**Mask(True, None, 0)._asdict(), **mask})
        return Choice(device, dtype, tq, tk, k, v, mask, packed, heads, 0, gluon)

    def choice(*args, **options):
        return choose_impl(call(*args, **options))

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
    # in large calls of 128 channels, Gluon kernels are fastest forward, and cuDNN backward if lse needs no gradient
    cudnns = call(gluon=True), call(gluon=True, causal=False)
    ours = call(gluon=True, window=64), call(gluon=True, packed=True), call(gluon=True, tq=512, tk=512, heads=16)
    ours += (call(gluon=True, k=64, v=64),)
    assert {choose_impl(x) for x in (*cudnns, *ours)} == {"triton"}
    assert {backends.backward_impl(None, x, False) for x in cudnns} == {"sdpa"}
    assert {backends.backward_impl(None, x, True) for x in cudnns} == {None}
    assert {backends.backward_impl(None, x, False) for x in (*ours, call(dtype=torch.float32))} == {None}
    assert {backends.backward_impl("gluon", x, False) for x in cudnns} == {"gluon"}
    assert choice("cpu") == choice("cpu", dtype=torch.float64) == choice("cpu", packed=True) == "sdpa"
    assert choice("cpu", tq=1) == choice("cpu", tq=64, window=64) == "sdpa"
    assert choice("cpu", tq=4097, window=64) == choice("cpu", tq=8192) == choice("cpu", k=64) == "reference"


def test_limits_name_the_way_out(monkeypatch):
    monkeypatch.setattr(backends, "cudnn_heads", lambda: 0)

    def why(impl, device="cuda", dtype=torch.bfloat16, tq=64, tk=64, k=64, v=64, **mask):
        return limit(impl, Choice(device, dtype, tq, tk, k, v, Mask(**{**Mask(True, None, 0)._asdict(), **mask})))

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
    call = Choice("cuda", torch.bfloat16, 64, 64, 64, 64, Mask(True, None, 0))
    monkeypatch.setattr(backends, "_oldest", lambda: (8, 0))
    monkeypatch.setattr(backends, "_has_flash_attention_2", backends._has_flash_attention_2.__wrapped__)
    assert "or flash-attn (2), neither of which is here" in (limit("flash_attn", call) or "")


def test_the_package_of_flash_attn_2_is_searched_for_once(monkeypatch):
    searched = []
    monkeypatch.setattr(backends, "_oldest", lambda: (8, 0))
    monkeypatch.setattr(backends, "is_installed", searched.append)
    backends._has_flash_attention_2.cache_clear()
    for tokens in (64, 65):
        limit("flash_attn", Choice("cuda", torch.bfloat16, tokens, tokens, 64, 64, Mask(True, None, 0)))
    backends._has_flash_attention_2.cache_clear()
    assert searched == ["flash_attn"]


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


@pytest.mark.parametrize("sinks", [3, 20])
def test_loop_tiles_may_shrink_after_a_launch_is_planned(sinks, monkeypatch, override):
    """The launcher halves BN of the forward and dQ kernels, after the step over sinks is chosen for the wider tile."""
    wide = attention_tuning.AttentionTile(32, 64, 4, 1)
    keys = wide._replace(BM=16)
    override(attention_tuning, attention=lambda kernel, *_: keys if kernel == "backward_keys" else wide)
    for module in (forward, backward):
        constants = module.constants
        monkeypatch.setattr(
            module, "constants", lambda *x, constants=constants: constants(*x) | ({} if x[-1] == keys else {"BN": 16})
        )
    x = [torch.randn(1, 90, 2, 16, requires_grad=True) for _ in range(3)]
    up = torch.randn(1, 90, 2, 16)
    got, wanted = (
        (y := attention(*x, window=25, sinks=sinks, impl=impl).o, *torch.autograd.grad(y, x, up))
        for impl in ("triton", "reference")
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("memory", "rows"), [(232_448, 32), (166_912, 32), (101_376, 16), (65_536, 16)])
def test_the_query_tile_of_wide_heads_follows_the_device(memory, rows, override):
    override(attention_tuning, block_memory=lambda: memory)
    assert rows == attention_tuning.attention("backward_keys", 256, torch.bfloat16).BM
    assert rows == attention_tuning.listed_keys(192, torch.float16).BM
