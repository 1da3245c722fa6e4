"""Attention to listed blocks and their choice: the definition, the references, and the kernels in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from tokenmix_core.ops import attention
from tokenmix_core.ops.common import AttentionOutput
from tokenmix_core.testing.closeness import assert_within
from tokenmix_lte.ops import block_attention, select_blocks
from tokenmix_lte.ops.selected_blocks import plan
from tokenmix_lte.ops.selected_blocks.autograd import block_attention_backward_op, block_attention_op

NAMES = ("o", "lse", "dq", "dk", "dv")


def inputs(B=1, TQ=20, TK=None, HQ=4, H=2, S=3, K=8, V=None, size=4, cu=None, dtype=torch.float64, device="cpu"):
    """q, k, v, and the options of a call; lists name blocks behind the query, none, and some twice."""
    rng, TK = torch.Generator().manual_seed(0), TQ if TK is None else TK
    shapes = (B, TQ, HQ, K), (B, TK, H, K), (B, TK, H, V or K)
    tensors = [torch.randn(s, generator=rng, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]
    blocks = torch.randint(-1, -(-TK // size) + 1, (B, TQ, H, S), generator=rng).to(device)
    options: dict = {"blocks": blocks, "block_size": size}
    if cu is not None:
        options["cu_seqlens"] = torch.tensor(cu, device=device)
    return tensors, options


def by_definition(q, k, v, *, blocks, block_size, scale=None, cu_seqlens=None):
    """The docstring's equations, one query at a time."""
    (B, TQ, HQ, K), (TK, H) = q.shape, k.shape[1:3]
    scale = K**-0.5 if scale is None else scale
    borders = [0, TK] if cu_seqlens is None else cu_seqlens.tolist()
    o, lse = q.new_zeros(B, TQ, HQ, v.shape[-1]), q.new_full((B, TQ, HQ), -torch.inf)
    for start, stop in itertools.pairwise(borders):
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
    """Outputs and gradients; rows that see nothing are left out of the log-sum-exp."""
    out = forward(*tensors, **options)
    rng = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x) for x in out)
    lse = out.lse.masked_fill(out.lse == -torch.inf, 0)
    return [out.o, lse, *torch.autograd.grad((out.o, lse), tensors, (do, dlse), materialize_grads=True)]


CASES = {
    "two rows, fewer queries": dict(B=2, TQ=9, TK=23),
    "packed": dict(TQ=24, cu=[0, 3, 3, 14, 24]),
    "unequal heads, a head of keys each": dict(TQ=14, HQ=2, H=2, K=4, V=6, size=5),
    "one token": dict(TQ=1, S=1),
}


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_the_reference_is_the_definition_in_value_and_gradient(sizes):
    tensors, options = inputs(**sizes)
    wanted = run(by_definition, tensors, options | {"scale": 0.7})
    for name, got, want in zip(NAMES, run(block_attention, tensors, options | {"scale": 0.7}), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_all_blocks_listed_are_causal_attention():
    tensors, options = inputs(TQ=18, TK=21)
    options["blocks"] = torch.arange(6).expand(1, 18, 2, 6)
    wanted = run(attention, tensors, {})
    for got, want in zip(run(block_attention, tensors, options), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


KERNEL_CASES = {
    "groups of 2, fewer queries": dict(B=2, TQ=20, TK=37, size=16),
    "groups of 3, packed": dict(TQ=44, HQ=3, H=1, size=16, cu=[0, 5, 5, 40, 44]),
    "groups of 16, odd heads, float16": dict(TQ=40, HQ=16, H=1, size=16, K=24, V=40, dtype=torch.float16),
    "no groups": dict(TQ=40, HQ=1, H=1, size=32, K=16),
}


@pytest.mark.parametrize("sizes", KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_kernels_err_no_more_than_the_eager_reference(sizes, device):
    sizes = {"dtype": torch.float32, "device": device} | sizes
    tensors, options = inputs(**sizes)
    exact = run(block_attention, [x.detach().double().requires_grad_() for x in tensors], options)
    eager = run(block_attention, tensors, options | {"impl": "reference"})
    got = run(block_attention, tensors, options | {"impl": "triton"})
    for name, *values in zip(NAMES, got, exact, eager, strict=True):
        assert_within(name, *values)


def test_queries_taken_in_runs_give_the_same(monkeypatch, device):
    tensors, options = inputs(TQ=40, size=16, dtype=torch.float32, device=device)
    options["impl"] = "triton"
    whole = run(block_attention, tensors, options)
    # a token takes 4 heads · 3 blocks · 8 channels · 4 bytes
    monkeypatch.setattr(plan, "_ROOM", 17 * 384)
    assert [(x.start, x.stop) for x in plan.slices(tensors[0], 8, 3)] == [(0, 14), (14, 28), (28, 40)]
    monkeypatch.setattr(plan, "_ROWS", 8)
    torch.testing.assert_close(run(block_attention, tensors, options), whole)


def test_the_list_of_a_block_that_all_queries_name_is_cut_into_pieces(monkeypatch, device):
    tensors, options = inputs(TQ=50, HQ=2, H=1, S=2, size=16, dtype=torch.float32, device=device)
    options["blocks"][..., 0] = 0
    monkeypatch.setattr(plan, "_ROWS", 16)
    exact = run(block_attention, tensors, options | {"impl": "reference"})
    torch.testing.assert_close(run(block_attention, tensors, options | {"impl": "triton"}), exact)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (dict(B=2, TQ=9, HQ=32, U=70), dict(count=5, block_size=4, shift=250)),
        (dict(TQ=14, HQ=3, H=1, U=6), dict(count=3, block_size=4, cu_seqlens=[0, 1, 1, 14])),
    ],
    ids=["many blocks", "packed"],
)
def test_the_choice_is_the_reference_s(sizes, options, device):
    q, pooled, lse = choice(**sizes, dtype=torch.float32, device=device)
    if "cu_seqlens" in options:
        options = options | {"cu_seqlens": torch.tensor(options["cu_seqlens"], device=device)}
    wanted = select_blocks(q, pooled, lse, **options, impl="reference")
    assert torch.equal(select_blocks(q, pooled, lse, **options, impl="triton"), wanted)


def choice(B=1, TQ=9, HQ=4, H=1, U=6, K=16, dtype=torch.float64, device="cpu"):
    rng = torch.Generator().manual_seed(0)
    tensors = (torch.randn(s, generator=rng, dtype=torch.float64) for s in ((B, TQ, HQ, K), (B, U, H, K), (B, TQ, HQ)))
    return [x.to(device, dtype) for x in tensors]


def test_the_choice_is_forced_blocks_and_those_with_most_attention():
    q, pooled, lse = choice(TQ=40, HQ=4, H=2, U=10)
    got = select_blocks(q, pooled, lse, 5, block_size=4)
    for i, h in itertools.product(range(40), range(2)):
        own = i // 4
        forced = {c for c in (0, own - 1, own) if c >= 0}
        sums = {
            c: sum(float((q[0, i, a] @ pooled[0, c, h] / 4 - lse[0, i, a]).exp()) for a in (2 * h, 2 * h + 1))
            for c in range(own)
            if c not in forced
        }
        best = sorted(sums, key=lambda c: -sums[c])[: 5 - len(forced)]
        wanted = sorted(forced | set(best))
        assert got[0, i, h].tolist() == wanted + [-1] * (5 - len(wanted))


def test_of_equal_blocks_the_lower_are_chosen(device):
    q, pooled, lse = choice(TQ=4, U=12, dtype=torch.float32, device=device)
    pooled.zero_()
    for impl in ("reference", "triton"):
        got = select_blocks(q, pooled, lse, 6, block_size=4, shift=44, impl=impl)
        assert got.flatten(0, 2).unique(dim=0).tolist() == [[0, 1, 2, 3, 10, 11]]


def test_operators_keep_torch_s_rules():
    tensors, options = inputs(TQ=20, size=16, dtype=torch.float32)
    q, k, v = (x.detach() for x in tensors)
    tests = ("test_schema", "test_faketensor")
    arguments = (options["blocks"], None, 16, 0.5)
    torch.library.opcheck(block_attention_op, (q, k, v, *arguments), test_utils=tests)
    o, lse = block_attention_op(q, k, v, *arguments)
    torch.library.opcheck(
        block_attention_backward_op, (q, k, v, arguments[0], o, lse, o, None, None, 16, 0.5), test_utils=tests
    )


MALFORMED = {
    "block_size": (dict(block_size=0), "block_size"),
    "blocks of 4 keys for kernels": (dict(impl="triton"), "blocks of 16"),
    "float blocks": (dict(blocks=torch.zeros(1, 20, 2, 3)), "blocks must be int32"),
    "blocks of other heads": (dict(blocks=torch.zeros(1, 20, 4, 3, dtype=torch.int32)), "H=2"),
    "scale": (dict(scale=-1.0), "scale"),
    "borders": (dict(cu_seqlens=torch.tensor([0, 19])), "cu_seqlens"),
    "impl": (dict(impl="gluon"), "Gluon"),
}


@pytest.mark.parametrize(("options", "words"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_are_refused(options, words):
    tensors, valid = inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match=words):
        block_attention(*tensors, **valid | options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(count=2), "count"),
        (dict(shift=-1), "shift"),
        (dict(shift=80), "U = 23 blocks"),
        (dict(cu_seqlens=torch.tensor([0, 4, 9]), shift=1), "shift"),
    ],
)
def test_malformed_choices_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        select_blocks(*choice(), **{"count": 3, "block_size": 4} | options)


def test_what_the_interpreter_cannot_do_is_refused():
    tensors, options = inputs(TQ=20, size=16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter, got bfloat16"):
        block_attention(*tensors, **options, impl="triton")
