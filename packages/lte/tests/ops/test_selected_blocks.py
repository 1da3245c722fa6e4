"""Attention to listed blocks and their selection: definitions, references, and kernels in the interpreter."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.ops import attention
from tokenmix_core.ops.types import AttentionOutput
from tokenmix_core.testing.operations import Call, KernelCase, OpContract
from tokenmix_lte.ops import block_attention, select_blocks
from tokenmix_lte.ops.selected_blocks import api, plan
from tokenmix_lte.ops.selected_blocks.autograd import (
    block_attention_backward_op,
    block_attention_op,
    select_blocks_op,
)

# bytes of partial outputs of 17 tokens: 4 heads, 3 listed blocks and 64 float32 channels (8, padded)
_WORKSPACE = 17 * 4 * 3 * 64 * 4


def inputs(
    B=1, TQ=20, TK=None, HQ=4, H=2, S=3, K=8, V=None, size=4, cu=None, dtype=torch.float64, device="cpu", seed=0
):
    """Return q, k, v, and a call's options; lists have blocks after the query, negative entries, and duplicates."""
    rng, TK = torch.Generator().manual_seed(seed), TQ if TK is None else TK
    shapes = (B, TQ, HQ, K), (B, TK, H, K), (B, TK, H, V or K)
    tensors = [torch.randn(s, generator=rng, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]
    blocks = torch.randint(-1, -(-TK // size) + 1, (B, TQ, H, S), generator=rng).to(device)
    options: dict = {"blocks": blocks, "block_size": size}
    if cu is not None:
        options["cu_seqlens"] = torch.tensor(cu, device=device)
    return tensors, options


def by_definition(q, k, v, *, blocks, block_size, scale=None, cu_seqlens=None):
    """Compute the equations in the docstring of `block_attention`, one query at a time."""
    (B, TQ, HQ, K), (TK, H) = q.shape, k.shape[1:3]
    scale = K**-0.5 if scale is None else scale
    boundaries = [0, TK] if cu_seqlens is None else cu_seqlens.tolist()
    o, lse = q.new_zeros(B, TQ, HQ, v.shape[-1]), q.new_full((B, TQ, HQ), -torch.inf)
    for start, stop in itertools.pairwise(boundaries):
        rows = range(TQ) if cu_seqlens is None else range(start, stop)
        for b, row, h in itertools.product(range(B), rows, range(HQ)):
            i, h_k = row - start + (TK - TQ), h * H // HQ
            named = blocks[b, row, h_k].tolist()
            seen = [start + j for c in named if c >= 0 for j in range(c * block_size, min((c + 1) * block_size, i + 1))]
            if seen:
                scores = scale * (k[b, seen, h_k] @ q[b, row, h])
                lse[b, row, h] = scores.logsumexp(0)
                o[b, row, h] = scores.softmax(0) @ v[b, seen, h_k]
    return AttentionOutput(o, lse)


def run(forward, tensors, options) -> list[torch.Tensor]:
    """Return outputs and gradients; the log-sum-exp of rows that see no key is set to 0."""
    out = forward(*tensors, **options)
    rng = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x) for x in out)
    lse = out.lse.masked_fill(out.lse == -torch.inf, 0)
    return [out.o, lse, *torch.autograd.grad((out.o, lse), tensors, (do, dlse), materialize_grads=True)]


class TestBlockAttention(OpContract):
    covers = (block_attention,)
    absent: ClassVar = {"step": "a token is decoded by a call of one query", "malformed_steps": "no steps"}
    forms: ClassVar = {"attention": block_attention}
    tokens = ("q", "k", "v", "blocks")
    past = ("k", "v")
    cases: ClassVar = {
        "two rows, fewer queries": dict(B=2, TQ=9, TK=23),
        "K ≠ V, one key head for each query head": dict(TQ=14, HQ=2, H=2, K=4, V=6, size=5),
    }
    lengths = (1, 3, 4, 5, 17)
    kernels: ClassVar = {
        "groups of 2, fewer queries": KernelCase(dict(B=2, TQ=20, TK=37, size=16), dtypes=("float32",)),
        "groups of 3, packed": KernelCase(dict(HQ=3, H=1, size=16, cu=[0, 5, 5, 40, 44]), dtypes=("float32",)),
        "many pairs, packed": KernelCase(dict(HQ=1, H=1, size=16, cu=[0, 70, 71, 280]), dtypes=("half",)),
        "groups of 16, odd heads": KernelCase(dict(TQ=40, HQ=16, H=1, size=16, K=24, V=40), dtypes=("half",)),
        "no groups": KernelCase(dict(TQ=40, HQ=1, H=1, size=32, K=16), dtypes=("float32",)),
    }
    parts: ClassVar = {"blocks of 4": dict(TQ=20)}
    packed: ClassVar = {"blocks of 4": dict(cu=[0, 3, 3, 4, 14, 24])}
    neighbours: ClassVar = dict(B=3, TQ=5, HQ=1, H=1, S=2, size=16)
    on_gpu: ClassVar = {"heads of 64": dict(B=2, TQ=300, S=4, size=16, K=64)}
    traced: ClassVar = dict(B=1, HQ=1, H=1, S=2, size=16)
    traced_lengths = (17, 21)
    replayed: ClassVar = dict(TQ=17, HQ=1, H=1, S=2, size=16)
    valid: ClassVar = dict(TQ=20)
    malformed: ClassVar = {
        "blocks of 0 keys": ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        "blocks of 4 keys for kernels": ({"impl": "triton"}, "blocks of 16"),
        "float blocks": ({"blocks": torch.zeros(1, 20, 2, 3)}, "blocks must be int32"),
        "blocks of other heads": ({"blocks": torch.zeros(1, 20, 4, 3, dtype=torch.int32)}, "H=2"),
        "a negative scale": ({"scale": -1.0}, "scale must be positive"),
        "boundaries beyond the end": ({"cu_seqlens": torch.tensor([0, 99])}, "cu_seqlens"),
        "no kernels in Gluon": ({"impl": "gluon"}, "Gluon"),
        "more queries than keys": (lambda x: x | {n: x[n][:, :9] for n in "kv"}, "at most as many as keys"),
        "a list": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
    }

    @staticmethod
    def results(output):
        return {"o": output.o, "lse": output.lse.masked_fill(output.lse == -torch.inf, 0)}

    def make(self, dtype=torch.float64, device="cpu", seed=0, T=20, cu=None, TQ=None, **sizes) -> Call:
        TQ = TQ or (T if cu is None else cu[-1])
        tensors, options = inputs(TQ=TQ, cu=cu, **sizes, dtype=dtype, device=device, seed=seed)
        return Call({n: x.detach() for n, x in zip("qkv", tensors, strict=True)}, options | {"scale": 0.7})

    def definition(self, **arguments):
        return by_definition(**arguments)

    def floor(self, name, eps):
        return eps

    def operators(self, device):
        (q, k, v), options = inputs(TQ=20, size=16, dtype=torch.float32, device=device)
        q, k, v = (x.detach() for x in (q, k, v))
        given = (q, k, v, options["blocks"], None, 16, 0.5)
        yield block_attention_op, given, "test_schema", "test_faketensor"
        o, lse = block_attention_op(*given)
        yield block_attention_backward_op, (*given, o, lse, o, None), "test_schema", "test_faketensor"


def selection(B=1, TQ=9, HQ=4, H=1, U=6, K=16, dtype=torch.float64, device="cpu", seed=0):
    rng = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(s, generator=rng, dtype=torch.float64) for s in ((B, TQ, HQ, K), (B, U, H, K), (B, TQ, HQ)))
    return [x.to(device, dtype) for x in tensors]


class TestSelection(OpContract):
    covers = (select_blocks,)
    absent: ClassVar = {
        "packed": "blocks of packed sequences are pooled separately; the contract of NSA's mixer covers them",
        "step": "a token is decoded by a call with one query",
        "malformed_steps": "no steps",
    }
    forms: ClassVar = {"selection": select_blocks}
    differentiable = False
    tokens = ("q", "lse")
    grows = ("pooled",)
    cases: ClassVar = {"groups": dict(T=40, HQ=4, H=2), "few blocks": dict(T=9, count=3)}
    lengths = (1, 3, 4, 5, 17)
    dtypes = ("float32",)
    kernels: ClassVar = {
        "many blocks": KernelCase(dict(B=2, T=9, HQ=32, U=70, count=5, shift=250)),
        "more blocks than a warp holds": KernelCase(dict(T=9, HQ=6, H=2, U=300, count=7, shift=1190)),
        "long lists": KernelCase(dict(T=3, HQ=2, U=300, count=70, shift=1190)),
        "packed": KernelCase(dict(T=14, HQ=3, H=1, U=6, count=3, cu_seqlens=[0, 1, 1, 14])),
        "a long sequence among packed ones": KernelCase(dict(T=90, HQ=1, U=26, count=6, cu_seqlens=[0, 3, 3, 86, 90])),
    }
    parts: ClassVar = {"of a sequence": dict(T=30)}
    neighbours: ClassVar = dict(B=3, T=5, HQ=16, count=3)
    traced: ClassVar = dict(B=1, HQ=16, count=3)
    traced_lengths = (9, 14)
    replayed: ClassVar = dict(T=5, HQ=16, count=3)
    valid: ClassVar = dict(T=9, count=3)
    malformed: ClassVar = {
        "fewer than are forced": ({"count": 2}, "count must be an integer of at least 3, got 2"),
        "a negative shift": ({"shift": -1}, "shift must be an integer of at least 0"),
        "a shift beyond the blocks": ({"shift": 80}, "U = 23 blocks"),
        "a shift of packed sequences": ({"cu_seqlens": torch.tensor([0, 4, 9]), "shift": 1}, "shift"),
        "a list": ({"pooled": [1.0]}, "pooled must be a tensor of shape .*, got list"),
        "boundaries past the end": ({"cu_seqlens": torch.tensor([0, 10])}, "cu_seqlens"),
    }

    @staticmethod
    def results(output):
        return {"blocks": output}

    def make(self, dtype=torch.float64, device="cpu", seed=0, T=9, U=None, count=5, **sizes) -> Call:
        names = ("shift", "cu_seqlens")
        options = {"count": count, "block_size": 4} | {name: sizes.pop(name) for name in names if name in sizes}
        if "cu_seqlens" in options:
            options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], device=device)
        U = max(U or 0, -(-(T + options.get("shift", 0)) // 4))
        q, pooled, lse = selection(TQ=T, U=U, **sizes, dtype=dtype, device=device, seed=seed)
        # lse is float32, or float64 for float64, as attention returns it
        return Call({"q": q, "pooled": pooled, "lse": lse.to(torch.promote_types(dtype, torch.float32))}, options)

    def operators(self, device):
        q, pooled, lse = selection(TQ=5, HQ=16, U=2, dtype=torch.float32, device=device)
        yield select_blocks_op, (q, pooled, lse, None, 3, 4, 0, 0.5), "test_schema", "test_faketensor"

    def definition(self, q, pooled, lse, *, count, block_size):
        """Select the forced blocks, and of the others those with most attention, the lower of equal ones."""
        (B, T, HQ, K), H = q.shape, pooled.shape[2]
        found = torch.full((B, T, H, count), -1, dtype=torch.int32)
        for b, i, h in itertools.product(range(B), range(T), range(H)):
            own, heads = i // block_size, range(h * HQ // H, (h + 1) * HQ // H)
            forced = {c for c in (0, own - 1, own) if c >= 0}
            sums = {
                c: sum(float((K**-0.5 * q[b, i, a] @ pooled[b, c, h] - lse[b, i, a]).exp()) for a in heads)
                for c in range(own)
                if c not in forced
            }
            best = sorted(sums, key=lambda c: -sums[c])[: count - len(forced)]
            chosen = sorted(forced | set(best))
            found[b, i, h, : len(chosen)] = torch.tensor(chosen)
        return found

    def part(self, arguments, start, stop):
        blocks = arguments["pooled"][:, : -(-stop // 4)]
        return super().part(arguments, start, stop) | {"pooled": blocks, "shift": start}


def test_all_blocks_listed_are_causal_attention():
    tensors, options = inputs(TQ=18, TK=21)
    options["blocks"] = torch.arange(6).expand(1, 18, 2, 6)
    wanted = run(attention, tensors, {})
    for got, want in zip(run(block_attention, tensors, options), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_runs_of_queries_give_the_same_outputs(monkeypatch, device):
    tensors, options = inputs(TQ=40, size=16, dtype=torch.float32, device=device)
    options["impl"] = "triton"
    whole = run(block_attention, tensors, options)
    monkeypatch.setattr(plan, "_MAX_WORKSPACE", _WORKSPACE)
    wide = torch.empty(1, 40, 4, 64)
    assert [(x.start, x.stop) for x in plan.query_runs(wide, 64, 3)] == [(0, 14), (14, 28), (28, 40)]
    monkeypatch.setattr(plan, "_SPLIT_ROWS", 8)
    torch.testing.assert_close(run(block_attention, tensors, options), whole)


@pytest.mark.parametrize("cu", [None, [0, 5, 5, 40, 90]], ids=["one sequence", "packed"])
def test_lists_hold_the_pairs_of_each_block_in_order(cu, device):
    from tokenmix_lte.ops.selected_blocks.lists import make_lists

    B, T, H, S, size, split = 1 if cu else 2, 90, 2, 4, 16, 8
    _, options = inputs(B=B, TQ=T, H=H, S=S, size=size, cu=cu, device=device)
    U = -(-T // size) if cu is None else T // size + len(cu) - 1
    lists = make_lists(
        options["blocks"], options.get("cu_seqlens"), first=0, TQ=T, TK=T, U=U, block_size=size, split=split
    )  # fmt: skip
    # each row and head has more than two runs of pairs
    assert 2 * plan.pairs_per_run(U) < T * S
    boundaries, begin = [0, T] if cu is None else cu, 0
    for r, slots in enumerate(lists.slots.flatten(0, 1).repeat_interleave(U, 0)):
        pairs = (slots == r % U).nonzero().flatten().tolist()
        end = begin + len(pairs)
        assert lists.ends[r] == end
        assert lists.listed[begin:end].tolist() == pairs
        # queries of pairs after the first `masked` ones see all keys of the block
        for t, s in (divmod(p, S) for p in pairs[lists.masked[r] :]):
            last = (options["blocks"][r // U // H, t, r // U % H, s] + 1) * size - 1
            assert t - max(x for x in boundaries if x <= t) >= last
        owned = range(begin // split + r, end // split + r + 1)
        assert lists.owners[owned.start : owned.stop].tolist() == [r] * len(owned)
        begin = end


def test_lists_are_made_once_for_a_call_and_its_gradient(monkeypatch, device):
    from tokenmix_lte.ops.selected_blocks import forward

    make, made = forward.make_lists, []
    monkeypatch.setattr(forward, "make_lists", lambda *x, **named: made.append(named) or make(*x, **named))
    tensors, options = inputs(TQ=40, size=16, dtype=torch.float32, device=device)
    monkeypatch.setattr(plan, "_MAX_WORKSPACE", _WORKSPACE)
    invalidate()
    run(block_attention, tensors, options | {"impl": "triton"})
    assert [x["first"] for x in made] == [0, 14, 28]


def test_the_list_of_a_block_that_all_queries_list_is_split(monkeypatch, device):
    tensors, options = inputs(TQ=50, HQ=2, H=1, S=2, size=16, dtype=torch.float32, device=device)
    options["blocks"][..., 0] = 0
    monkeypatch.setattr(plan, "_SPLIT_ROWS", 16)
    exact = run(block_attention, tensors, options | {"impl": "reference"})
    torch.testing.assert_close(run(block_attention, tensors, options | {"impl": "triton"}), exact)


@pytest.mark.parametrize("own", [11, 299], ids=["few blocks", "many blocks"])
def test_among_equal_blocks_the_lower_are_selected(own, device):
    q, pooled, lse = selection(TQ=4, U=own + 1, dtype=torch.float32, device=device)
    pooled.zero_()
    for impl in ("reference", "triton"):
        got = select_blocks(q, pooled, lse, 6, block_size=4, shift=4 * own, impl=impl)
        assert got.flatten(0, 2).unique(dim=0).tolist() == [[0, 1, 2, 3, own - 1, own]]


def test_runs_of_queries_select_the_same_blocks(monkeypatch, device):
    q, pooled, lse = selection(TQ=40, U=10, dtype=torch.float32, device=device)
    whole = select_blocks(q, pooled, lse, 5, block_size=4, impl="triton")
    # bytes for 17 queries: 4 each for 64 candidates, 2 selected blocks and their 2 probabilities
    monkeypatch.setattr(plan, "_MAX_WORKSPACE", 17 * (64 + 4) * 4)
    assert [(x.start, x.stop) for x in plan.runs(40, (64 + 4) * 4)] == [(0, 14), (14, 28), (28, 40)]
    torch.testing.assert_close(select_blocks(q, pooled, lse, 5, block_size=4, impl="triton"), whole)


def test_bfloat16_in_the_interpreter_is_refused():
    tensors, options = inputs(TQ=20, size=16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter, got bfloat16"):
        block_attention(*tensors, **options, impl="triton")


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"K": 192}, "takes head sizes up to 128, got K=192"), ({"block_size": 48}, "takes blocks of 16, 32, 64 or 128")],
)
def test_the_reference_warns_on_a_gpu_once(changed, why):
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16)
    sizes = {"K": 64, "V": 64, "block_size": 64} | changed
    dims = {"B": 1, "TQ": 8, "HQ": 4, "H": 1, "K": sizes["K"]}

    def choose():
        limit = plan.limit(**sizes, q=x)
        return api._options("block_attention", dims, x, sizes["block_size"], None, None, None, limit)[1]

    with pytest.warns(RuntimeWarning, match=f"block_attention: impl='triton' {why}"):
        assert choose() == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose() == "reference"
