"""Attention over retained keys on any device: the definition, the reference, and the kernels in the interpreter."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch

from tokenmix_core.ops import attention, kept_attention
from tokenmix_core.ops.softmax_attention import tuning as dense_tuning
from tokenmix_core.ops.sparse_attention import tuning
from tokenmix_core.ops.sparse_attention.autograd import kept_attention_backward_op, kept_attention_op
from tokenmix_core.ops.sparse_attention.reference import units_of_tokens
from tokenmix_core.ops.types import AttentionOutput
from tokenmix_core.testing.operations import Call, KernelCase, OpContract

NEG_INF = float("-inf")
NAMES = ("o", "lse", "dq", "dk", "dv", "dkeep")


def units(TK: int, unit: int, cu: list[int] | None) -> int:
    return -(-TK // unit) if cu is None or unit == 1 else TK // unit + len(cu) - 1


def inputs(
    B=1, TQ=20, TK=None, HQ=2, H=1, HM=1, K=8, V=None, unit=1, kept=0.4, until=False, cu=None,
    dtype=torch.float64, device="cpu", seed=0,
):  # fmt: skip
    """q, k, v, a float keep of zeros and ones, and the options of a call; a function for `kept` marks the units."""
    generator = torch.Generator().manual_seed(seed)
    TK = TQ if TK is None else TK
    shapes = (B, TQ, HQ, K), (B, TK, H, K), (B, TK, H, V or K)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]
    U = units(TK, unit, cu)
    keep = kept(B, U, HM) if callable(kept) else torch.rand(B, U, HM, generator=generator) < kept
    keep = keep.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    options: dict = {"unit": unit}
    if until:
        # from none on, and never
        options["until"] = torch.randint(0, TK + 1, (B, TK, H), generator=generator).to(device)
        options["until"][:, ::5] = 1 << 40
    if cu is not None:
        options["cu_seqlens"] = torch.tensor(cu, device=device)
    return [x.requires_grad_() for x in (*tensors, keep)], options


def upstream(out: AttentionOutput, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in out]


def by_definition(
    q, k, v, keep, *, unit=1, window=None, until=None, scale=None, cu_seqlens=None, keep_gradient="exponentials"
):  # fmt: skip
    """The equations of the README, one query at a time, with a factor of retained pairs' exponentials or of values."""
    (B, TQ, HQ, K), (TK, H), HM = q.shape, k.shape[1:3], keep.shape[2]
    scale = K**-0.5 if scale is None else scale
    boundaries = [0, TK] if cu_seqlens is None else cu_seqlens.tolist()
    o, lse = q.new_zeros(B, TQ, HQ, v.shape[-1]), q.new_full((B, TQ, HQ), NEG_INF)
    for n, (start, stop) in enumerate(itertools.pairwise(boundaries)):
        first_unit = start if unit == 1 else start // unit + n
        queries = range(TQ) if cu_seqlens is None else range(start, stop)
        for b, row, h in itertools.product(range(B), queries, range(HQ)):
            i, h_k = row - start + (TK - TQ), h * H // HQ
            left = i // unit * unit if window is None else i - window + 1
            seen, logs, factors = [], [], []
            for j in range(i + 1):
                mark = keep[b, first_unit + j // unit, h_k * HM // H]
                if j < left and not (mark > 0.5 and (until is None or i < until[b, start + j, h_k])):
                    continue
                seen.append(start + j)
                one = 1 + mark - mark.detach()
                logs.append((one if j < left and keep_gradient == "exponentials" else one.detach()).log())
                factors.append(one if keep_gradient == "values" else one.detach())
            if seen:
                scores = scale * (k[b, seen, h_k] @ q[b, row, h]) + torch.stack(logs)
                lse[b, row, h] = scores.logsumexp(0)
                o[b, row, h] = scores.softmax(0) @ (torch.stack(factors)[:, None] * v[b, seen, h_k])
    return AttentionOutput(o, lse)


def run(forward, tensors, options):
    """Outputs and gradients; rows that see nothing are left out of the log-sum-exp."""
    out = forward(*tensors, **options)
    do, dlse = upstream(out)
    blind = out.lse == NEG_INF
    grads = torch.autograd.grad((out.o, out.lse.masked_fill(blind, 0)), tensors, (do, dlse), materialize_grads=True)
    return [out.o, out.lse.masked_fill(blind, 0), *grads]


HEADS = dict(HQ=4, H=2, HM=1)
LOCAL = ("window", "scale", "keep_gradient")
VALUES = dict(keep_gradient="values")


def in_small_tiles(override):
    """Use tiles of 16 x 32 and few work tiles: many tiles in a short sequence, with partial sums."""
    tile = dense_tuning.AttentionTile(16, 32, 4, 1)
    override(tuning, kept_attention=lambda *call: tile)
    override(dense_tuning, listed_keys=lambda *call: tile, work_tiles=lambda *call: 5)


@pytest.fixture
def small_tiles(override):
    in_small_tiles(override)


def unequal(B, U, HM):
    """All of one head, nothing of the next, the first units of the one after."""
    keep = torch.zeros(B, U, HM, dtype=torch.bool)
    keep[..., 0] = True
    keep[:, : U // 3, 2:] = True
    return keep


def last_alone(B, U, HM):
    return (torch.arange(U) == U - 1)[None, :, None].expand(B, U, HM)


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


class TestKeptAttention(OpContract):
    straight_through = ("keep",)
    covers = (kept_attention,)
    absent: ClassVar = {"step": "a token is decoded by a call of one query", "malformed_steps": "no steps"}
    forms: ClassVar = {"kept": kept_attention}
    eager = (None, "reference")
    tokens = ("q", "k", "v", "until")
    grows = ("keep",)
    past = ("k", "v", "until")
    cases: ClassVar = {
        "tokens, a window": dict(TQ=24, **HEADS, window=5),
        "tokens, each its own unit": dict(TQ=12),
        "a mark for each key head": dict(TQ=18, B=2, HQ=4, H=2, HM=2, window=4),
        "until": dict(TQ=24, HQ=2, H=2, HM=1, until=True, kept=0.7, window=3),
        "fewer queries": dict(TQ=7, TK=20, **HEADS, until=True, window=4),
        "fewer keys": dict(TQ=20, TK=13, window=4),
        "chunks": dict(TQ=140, unit=64, kept=0.6),
        "chunks of 128, ragged, fewer queries": dict(TQ=20, TK=270, unit=128, kept=0.9, HQ=2, H=2, HM=1),
        "chunks and a window": dict(TQ=30, TK=200, unit=64, kept=0.7, window=70),
        "packed": dict(TQ=24, cu=[0, 3, 3, 14, 24], **HEADS, window=4),
        "packed chunks": dict(TQ=150, unit=64, cu=[0, 5, 5, 135, 150], kept=0.6, K=4),
        "unequal heads and a scale": dict(TQ=12, K=4, V=6, window=3, scale=0.7),
        "a window that holds all": dict(TQ=12, window=99),
        "one token": dict(TQ=1, window=1),
        "marks of values": dict(TQ=24, **HEADS, window=5, until=True, **VALUES),
        "marks of values, packed chunks": dict(TQ=150, unit=64, cu=[0, 5, 5, 135, 150], kept=0.6, K=4, **VALUES),
    }
    lengths = (1, 2, 63, 64, 65)
    kernels: ClassVar = {
        name: KernelCase(sizes, patch=in_small_tiles)
        for name, sizes in {
            "tokens, a window": dict(TQ=70, HQ=4, H=2, HM=1, window=20),
            "tokens, each its own unit": dict(TQ=40),
            "lists of unequal length": dict(TQ=70, HQ=4, H=4, HM=4, kept=unequal, window=10),
            "nothing kept": dict(TQ=70, kept=0.0, window=20),
            "all kept": dict(TQ=70, kept=1.0, B=2, window=20),
            "a window of one": dict(TQ=40, window=1),
            "a window that holds all": dict(TQ=40, window=99),
            "until": dict(TQ=70, HQ=2, H=2, HM=1, until=True, kept=0.7, window=10),
            "fewer queries": dict(TQ=21, TK=97, HQ=4, H=2, HM=2, until=True, window=30),
            "fewer keys": dict(TQ=70, TK=33, window=9),
            "one query": dict(TQ=1, TK=70, B=2, window=9),
            "chunks": dict(TQ=150, unit=64, HQ=2, H=2, HM=1, kept=0.6),
            "chunks of 128, ragged, fewer queries": dict(TQ=40, TK=300, unit=128, kept=0.6),
            "chunks of 256, the last alone kept": dict(TQ=300, unit=256, kept=last_alone),
            "chunks and a window": dict(TQ=40, TK=200, unit=64, kept=0.7, window=70),
            "K and V differ, neither a power of two": dict(TQ=40, K=24, V=40, window=9),
            "packed": dict(TQ=70, cu=[0, 3, 3, 40, 70], HQ=4, H=2, HM=1, window=10),
            "packed chunks": dict(TQ=150, unit=64, cu=[0, 5, 5, 135, 150], kept=0.6),
            "marks of values": dict(TQ=70, HQ=4, H=2, HM=1, until=True, window=20, **VALUES),
            "marks of values, nothing kept": dict(TQ=40, kept=0.0, K=24, V=40, window=9, **VALUES),
            "marks of values, packed": dict(TQ=70, cu=[0, 3, 3, 40, 70], HQ=4, H=4, HM=2, window=10, **VALUES),
            "marks of values, packed chunks": dict(TQ=150, unit=64, cu=[0, 5, 5, 135, 150], kept=0.6, **VALUES),
        }.items()
    }
    parts: ClassVar = {
        "tokens": dict(TQ=50, **HEADS, window=6),
        "tokens until": dict(TQ=50, **HEADS, window=6, until=True),
        "chunks": dict(TQ=200, **HEADS, unit=64),
    }
    packed: ClassVar = {
        f"{name}, units of {unit}": dict(TQ=200, unit=unit, cu=[0, 1, 70, 70, 200], kept=0.5, window=9, until=until)
        for name, unit, until in (("for good", 1, False), ("for good", 64, False), ("until", 1, True))
    }
    neighbours: ClassVar = dict(TQ=7, B=3, window=3)
    laid: ClassVar = {"until": dict(TQ=7, window=3, until=True)}
    on_gpu: ClassVar = {"heads of 128": dict(B=2, TQ=300, HQ=4, H=2, K=128, window=50, until=True)}
    traced: ClassVar = dict(B=2, window=3)
    # a window that holds all is another graph
    traced_lengths = (5, 9)
    replayed: ClassVar = dict(TQ=7, K=16, window=3)
    valid: ClassVar = dict(TQ=5, TK=7, B=2, HQ=4, H=4, HM=2)
    malformed: ClassVar = {
        "a list": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
        "marks of other heads": ({"keep": z(2, 7, 3)}, "H must be a multiple of HM, got H=4 and HM=3"),
        "marks without heads": ({"keep": z(2, 7)}, r"keep must have shape \[.*got \[2, 7\]"),
        "integer marks": ({"keep": z(2, 7, 2, dtype=torch.int64)}, "keep must be bool, .*got int64"),
        "marks of fewer tokens": ({"keep": z(2, 6, 2)}, "= 7 units for TK=7 and unit=1, got 6"),
        "marks of tokens for chunks": ({"unit": 64}, "= 1 units for TK=7 and unit=64, got 7"),
        "units of half a chunk": ({"unit": 32}, "unit must be 1 or a multiple of 64, got 32"),
        "a window of zero": ({"window": 0}, "window .*got 0"),
        "ends of floats": ({"until": z(2, 7, 4)}, "until must be int32, int64, got float32"),
        "ends of other heads": ({"until": z(2, 7, 2, dtype=torch.int32)}, r"until must have .*got \[2, 7, 2\]"),
        "another gradient of marks": ({"keep_gradient": "weights"}, "keep_gradient must be .*got 'weights'"),
        "a negative scale": ({"scale": -1.0}, "scale must be positive, got -1.0"),
        "boundaries in a list": ({"cu_seqlens": [0, 5]}, r"cu_seqlens must be a tensor of shape \[.*\], got list"),
        "torch's kernel": ({"impl": "sdpa"}, "impl must be .*got 'sdpa'"),
    }

    @staticmethod
    def results(output):
        return {"o": output.o, "lse": output.lse.masked_fill(output.lse == NEG_INF, 0)}

    def make(self, dtype=torch.float64, device="cpu", seed=0, T=20, **sizes) -> Call:
        local = {name: sizes.pop(name) for name in LOCAL if name in sizes}
        tensors, options = inputs(**{"TQ": T, **sizes}, dtype=dtype, device=device, seed=seed)
        named = dict(zip(("q", "k", "v", "keep"), (x.detach() for x in tensors), strict=True))
        return Call(named, options | local)

    def definition(self, **arguments):
        return by_definition(**arguments)

    def part(self, arguments, start, stop):
        units = -(-stop // arguments["unit"])
        return super().part(arguments, start, stop) | {"keep": arguments["keep"][:, :units]}

    def document(self, arguments, n, start, stop):
        unit = arguments["unit"]
        first = start if unit == 1 else start // unit + n
        keep = arguments["keep"][:, first : first - (start - stop) // unit]
        return super().document(arguments, n, start, stop) | {"keep": keep}

    def floor(self, name, eps):
        # the gradient of `keep` sums thousands of terms of either sign
        return (16 if name == "dkeep" and eps < 1e-5 else 2) * eps

    def operators(self, device):
        tensors, _ = inputs(TQ=6, dtype=torch.float32, device=device)
        until = torch.full((1, 6, 1), 5, device=device)
        for impl in ("triton", "reference"):
            rest = (until, None, 1, 2, 0.5, "values", impl)
            yield kept_attention_op, (*tensors, *rest)
            found = [x.detach() for x in kept_attention_op(*tensors, *rest)]
            given = (*(x.detach() for x in tensors), *rest)
            for through_keep in (True, False):
                yield kept_attention_backward_op, (*given, *found, found[0], None, through_keep)


@pytest.mark.parametrize("unit", [1, 64])
@pytest.mark.parametrize("cu", [None, [0, 90, 150]], ids=["whole", "packed"])
def test_all_kept_is_causal_attention_and_none_kept_is_the_window(unit, cu):
    for kept, window in ((1.0, None), (0.0, 20)):
        (*x, keep), options = inputs(TQ=150, unit=unit, kept=kept, cu=cu)
        boundaries = options.get("cu_seqlens")
        got = run(lambda *x, keep=keep, options=options: kept_attention(*x, keep, window=20, **options), x, {})
        want = run(lambda *x, w=window, cu=boundaries: attention(*x, window=w, cu_seqlens=cu), x, {})
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_reference_computes_queries_in_blocks(monkeypatch):
    from tokenmix_core.ops.sparse_attention import reference

    tensors, options = inputs(TQ=70, TK=90, **HEADS, until=True)
    whole = run(kept_attention, tensors, options | {"window": 9})
    monkeypatch.setattr(reference, "_BLOCK_SCORES", 1)
    torch.testing.assert_close(run(kept_attention, tensors, options | {"window": 9}), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        (dict(TQ=70, B=2, **HEADS, kept=0.8), 9),
        (dict(TQ=40, TK=97, HQ=4, H=4, HM=2), 20),
        (dict(TQ=70, TK=33), 9),
        (dict(TQ=40, TK=200, unit=64, HQ=2, H=2, HM=1, kept=0.8), 30),
        (dict(TQ=150, unit=64, kept=0.8), None),
    ],
    ids=["tokens", "fewer queries", "fewer keys", "chunks and a window", "chunks"],
)
def test_blocks_of_queries_list_no_keys_evicted_before_them(sizes, window, device, small_tiles, monkeypatch):
    from tokenmix_core.ops.sparse_attention import query_blocks

    tensors, options = inputs(**sizes, until=True, dtype=torch.float32, device=device)
    tensors, options = [x.detach() for x in tensors], options | {"window": window}
    want = kept_attention(*tensors, **options, impl="reference")
    listed, call = [], query_blocks.autograd.kept_attention
    monkeypatch.setattr(query_blocks, "BLOCK", 16)
    monkeypatch.setattr(query_blocks.autograd, "kept_attention", lambda *x: listed.append(x[3]) or call(*x))
    got = kept_attention(*tensors, **options, impl="triton")
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
    assert len(listed) == -(-sizes["TQ"] // 16)
    ends = options["until"]
    for first, keep in zip(range(0, sizes["TQ"], 16), listed, strict=True):
        position = first + ends.shape[1] - sizes["TQ"]
        for b, u, m in keep.nonzero().tolist():
            heads = slice(m * ends.shape[2] // keep.shape[2], (m + 1) * ends.shape[2] // keep.shape[2])
            assert (ends[b, u * options["unit"] : (u + 1) * options["unit"], heads] > position).any()


def test_blocks_are_for_long_calls_without_gradients(monkeypatch):
    from tokenmix_core.ops.sparse_attention import autograd, query_blocks

    monkeypatch.setattr(query_blocks, "BLOCK", 16)
    (q, k, v, keep), options = inputs(TQ=20, until=True)
    x = autograd.Inputs(q, k, v, keep, options["until"], None, 1, 5, 1.0, "values", "triton")
    assert not query_blocks.takes_blocks(x)
    with torch.no_grad():
        assert query_blocks.takes_blocks(x)
        assert not query_blocks.takes_blocks(x._replace(q=q[:, :16]))
        assert not query_blocks.takes_blocks(x._replace(until=None))
        assert not query_blocks.takes_blocks(x._replace(cu_seqlens=torch.tensor([0, 20])))


def test_a_bool_keep_is_the_same_choice():
    (*x, keep), options = inputs(TQ=30, **HEADS)
    want, got = (kept_attention(*x, t, window=5, **options) for t in (keep, keep.detach() > 0.5))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for a, b in zip(*(torch.autograd.grad(out.o.sum(), x) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_marks_between_packed_chunks_mean_nothing():
    cu = torch.tensor([0, 10, 70, 100])
    used = torch.zeros(1, 4, 1, dtype=torch.bool).index_fill(1, units_of_tokens(100, 64, cu, cu.device), True)
    (*x, keep), options = inputs(TQ=100, unit=64, cu=cu.tolist())
    assert not used.all()
    outs = [
        kept_attention(*x, keep.detach().where(used, mark), **options).o
        for mark in (torch.tensor(0.0), torch.tensor(1.0))
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=0)


def test_kernels_take_views_and_give_the_same_bits_each_time(device, small_tiles):
    (q, k, v, keep), _ = inputs(TQ=70, HQ=2, H=2, HM=2, K=16, dtype=torch.float32, device=device)
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    views.append(keep.detach().mT.contiguous().mT.requires_grad_())
    runs = [run(kept_attention, x, {"window": 9, "impl": "triton"}) for x in ((q, k, v, keep), views, views)]
    for name, *results in zip(NAMES, *runs, strict=True):
        assert all(torch.equal(results[0], x) for x in results[1:]), name


@pytest.mark.parametrize("sinks", [3, 40])
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 40, 70]], ids=["whole", "packed"])
def test_sinks_are_such_a_list(cu, sinks, device, small_tiles):
    (*x, _), _ = inputs(TQ=70, B=1 if cu else 2, HQ=4, H=2, K=16, dtype=torch.float32, device=device)
    boundaries = None if cu is None else torch.tensor(cu, device=device)
    positions = torch.arange(70, device=device)
    for start, stop in itertools.pairwise(cu or []):
        positions[start:stop] -= start
    marks = (positions < sinks)[None, :, None].expand(len(x[0]), 70, 1)
    want = run(lambda *x: kept_attention(*x, marks, window=9, cu_seqlens=boundaries), x, {})
    got = run(lambda *x: attention(*x, window=9, sinks=sinks, cu_seqlens=boundaries, impl="triton"), x, {})
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("blocks", [1, 3])
def test_lists_hold_every_unit_once_and_in_order(blocks, device, monkeypatch):
    from tokenmix_core.ops.sparse_attention import mask

    monkeypatch.setattr(mask, "_BLOCK", {1: 64, 3: 16}[blocks])
    # a multiple of the block, and not
    for U in (48, 41):
        keep = torch.rand(2, U, 3, generator=torch.Generator().manual_seed(U)).to(device)
        ranks, lists = (torch.empty(s, dtype=torch.int32, device=device) for s in ((2, 3, U + 1), (2, 3, U)))
        mask.list_units(keep, ranks, lists)
        for b, m in itertools.product(range(2), range(3)):
            kept = keep[b, :, m] > 0.5
            count = int(kept.sum())
            assert ranks[b, m].tolist() == [0, *kept.cumsum(0).tolist()]
            assert lists[b, m, :count].tolist() == kept.nonzero()[:, 0].tolist()
            assert lists[b, m, count:].tolist() == (~kept).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_work_tiles_cover_all_query_tiles_once_and_split_the_work(programs, device, monkeypatch, override):
    from tokenmix_core.ops.softmax_attention.listed_keys import tile_schedule
    from tokenmix_core.ops.softmax_attention.types import KeyLists
    from tokenmix_core.ops.sparse_attention import mask

    override(dense_tuning, work_tiles=lambda *call: programs)
    monkeypatch.setattr(tile_schedule, "_LEAST", 1)
    T, H, BM, BN, window = 150, 2, 16, 32, 20
    keep = unequal(1, T, H).to(device)
    ranks, lists = (torch.empty(s, dtype=torch.int32, device=device) for s in ((1, H, T + 1), (1, H, T)))
    mask.list_units(keep, ranks, lists)
    q = k = torch.empty(1, T, H, 1, device=device)
    made = tile_schedule.schedule_tiles(KeyLists(ranks, lists, None, None, 1, window), q, k, BM, BN, None)
    m_min, _, _, m_max, *_, splits, first_work, first_partial = made.facts.tolist()
    split_size, num_work, num_partials = made.totals.tolist()
    # all of the first head is kept, nothing of the second
    wanted = [T // BM + 1 - j // BM for j in range(0, T, BN)]
    wanted += [min(T // BM + 1, -(-(min(j + BN, T) - 1 + window) // BM)) - j // BM for j in range(0, T, BN)]
    work = [b - a for a, b, n in zip(m_min, m_max, splits, strict=True) if n]
    assert sorted(work) == sorted(wanted)
    assert split_size == max(1, -(-sum(work) // programs))
    assert [n for n in splits if n] == [max(1, -(-w // split_size)) for w in work]
    assert num_work == sum(splits) <= len(made.work_tiles)
    assert num_partials == sum(n for n in splits if n > 1) <= len(made.partial_tiles)
    for x, n in enumerate(splits):
        assert made.work_tiles[first_work[x] :][:n].tolist() == [x] * n
        assert n < 2 or made.partial_tiles[first_partial[x] :][:n].tolist() == [x] * n


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_no_keys_and_no_queries(impl, device):
    for sizes in (dict(TQ=5, TK=0), dict(TQ=0, TK=5), dict(B=0)):
        tensors, options = inputs(**sizes, dtype=torch.float32, device=device)
        out = kept_attention(*tensors, window=2, impl=impl, **options)
        assert (out.o == 0).all()
        assert (out.lse == NEG_INF).all()
        grads = torch.autograd.grad(out.o.sum(), tensors)
        assert all((g == 0).all() for g in grads)
