"""Writes that chunks withhold: the state after a chunk holds a share of what the chunk has written."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops import chunk_gated_delta_rule, recurrent_gated_delta_rule
from tokenmix_core.ops.gated_delta_rule.plan import GLUON
from tokenmix_core.testing.agreement import RoundedProducts, assert_agrees, values_and_gradients
from tokenmix_core.testing.closeness import assert_within, relative_error

PACKED = [0, 0, 1, 64, 64, 129, 330]
FORMS = [chunk_gated_delta_rule, recurrent_gated_delta_rule]


def inputs(B=2, T=70, H=1, HV=2, K=16, V=16, N=None, borders=None, chunk=64, dtype=torch.float64, device="cpu", seed=0):
    """Random arguments by name, with a factor of any sign for each chunk's writes."""
    generator = torch.Generator(device).manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device=device)
    rand = partial(torch.rand, generator=generator, device=device)
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    slots = chunk_slots(1, T, chunk, borders) if borders is not None else -(-T // chunk)
    x = {
        "q": randn(B, T, H, K).to(dtype),
        "k": randn(B, T, H, K).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": (-0.1 * rand(B, T, HV)).to(gate),
        "beta": (2 * rand(B, T, HV)).to(gate),
        "writes": randn(B, slots, HV).to(gate),
    }
    return x | ({"initial_state": randn(N, HV, K, V).to(gate)} if N else {})


def packed(device="cpu"):
    return torch.tensor(PACKED, dtype=torch.int32, device=device)


def literal(q, k, v, g, beta, writes, initial_state, scale, chunk):
    """One sequence and head: a chunk starts from the true state, and its writes then enter it by a share."""
    S, outputs = initial_state, []
    for first in range(0, len(q), chunk):
        inside, decay = S, torch.zeros(())
        for t in range(first, min(first + chunk, len(q))):
            inside, decay = inside * g[t].exp(), decay + g[t]
            inside = inside + torch.outer(k[t], beta[t] * (v[t] - inside.T @ k[t]))
            outputs.append(scale * inside.T @ q[t])
        S = decay.exp() * S + writes[first // chunk] * (inside - decay.exp() * S)
    return torch.stack(outputs), S


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_references_equal_the_definition(form, chunk):
    x = inputs(T=200, K=4, V=3, N=2, chunk=chunk)
    o, final_state = form(**x, scale=0.5, qk_l2norm=False, write_chunk=chunk)
    q, k = x["q"][1, :, 0], x["k"][1, :, 0]
    rest = (x[name][1, :, 1] for name in ("v", "g", "beta", "writes"))
    expected, state = literal(q, k, *rest, x["initial_state"][1, 1], 0.5, chunk)
    assert relative_error(o[1, :, 1], expected) < 1e-10
    assert relative_error(final_state[1, 1], state) < 1e-10


@pytest.mark.parametrize("chunk", [64, 128, 192])
@pytest.mark.parametrize("T", [1, 64, 65, 330])
def test_chunkwise_gradients_equal_those_token_by_token(T, chunk):
    x = inputs(T=T, H=1, HV=2, K=4, V=3, N=2, chunk=chunk)
    by_chunks, upstream = values_and_gradients(partial(chunk_gated_delta_rule, qk_l2norm=True, write_chunk=chunk), x)
    form = partial(recurrent_gated_delta_rule, qk_l2norm=True, write_chunk=chunk)
    by_tokens, _ = values_and_gradients(form, x, upstream)
    for name in by_tokens:
        assert relative_error(by_chunks[name], by_tokens[name]) < 1e-9, name


@pytest.mark.parametrize("form", FORMS)
def test_all_written_is_the_operation_without_them(form):
    x = inputs(T=150, K=4, V=4, N=2)
    x["writes"] = torch.ones_like(x["writes"])
    got, expected = form(**x, qk_l2norm=True), form(**{n: y for n, y in x.items() if n != "writes"}, qk_l2norm=True)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-12


def test_nothing_written_leaves_a_decayed_state():
    x = inputs(T=150, K=4, V=4, N=2)
    x["writes"] = torch.zeros_like(x["writes"])
    final_state = chunk_gated_delta_rule(**x, qk_l2norm=True).final_state
    expected = x["g"].sum(1).exp()[..., None, None] * x["initial_state"]
    assert relative_error(final_state, expected) < 1e-12


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_chunks_of_packed_sequences_are_counted_from_their_starts(form, chunk):
    borders = packed()
    x = inputs(B=1, T=330, K=4, V=4, N=6, borders=borders, chunk=chunk)
    o, final_state = form(**x, cu_seqlens=borders, qk_l2norm=True, write_chunk=chunk)
    for n in range(6):
        begin, end = PACKED[n : n + 2]
        if begin == end:
            continue
        alone = {name: value[:, begin:end] for name, value in x.items() if name not in ("initial_state", "writes")}
        first = begin // chunk + n
        writes = x["writes"][:, first : first + -(-(end - begin) // chunk)]
        state = x["initial_state"][n : n + 1]
        got = form(**alone, writes=writes, initial_state=state, qk_l2norm=True, write_chunk=chunk)
        torch.testing.assert_close(o[:, begin:end], got.o)
        torch.testing.assert_close(final_state[n], got.final_state[0])


def test_a_prefill_that_ends_inside_a_chunk_is_two_calls():
    x = inputs(T=180, K=8, V=8)
    whole = chunk_gated_delta_rule(**x)
    before, after = ({n: y[:, part] for n, y in x.items() if n != "writes"} for part in (slice(128), slice(128, None)))
    first = chunk_gated_delta_rule(**before, writes=x["writes"][:, :2])
    rest = chunk_gated_delta_rule(**after, writes=x["writes"][:, 2:], initial_state=first.final_state)
    torch.testing.assert_close(torch.cat([first.o, rest.o], 1), whole.o)
    torch.testing.assert_close(rest.final_state, whole.final_state)


def check(x, form=chunk_gated_delta_rule, impl="triton", **options):
    """Assert that values and gradients err at most twice as much as the eager reference in the same dtype."""
    options = {"qk_l2norm": True} | options
    function, reference = partial(form, impl=impl, **options), partial(form, impl="reference", **options)
    dtype = x["q"].dtype
    if dtype.itemsize == 2:
        # whose products, too, are of 16 bits
        got, upstream = values_and_gradients(function, x)
        exact, _ = values_and_gradients(reference, x, upstream, dtype=torch.float64)
        with RoundedProducts(dtype):
            products, _ = values_and_gradients(reference, x, upstream)
        for name, value in got.items():
            assert_within(name, value, exact[name], products[name], floor=torch.finfo(dtype).eps / 2)
        return
    assert_agrees(function, reference, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [64, 128])
def test_kernels_agree_with_the_reference(form, chunk, device):
    check(inputs(T=200, K=64, V=64, N=2, chunk=chunk, dtype=torch.float32, device=device), form, write_chunk=chunk)


@pytest.mark.parametrize("chunk", [64, 128])
def test_kernels_agree_on_packed_sequences(chunk, device):
    borders = packed(device)
    x = inputs(B=1, T=330, H=1, HV=2, K=64, V=64, N=6, borders=borders, chunk=chunk, dtype=torch.float32, device=device)
    # slots without a chunk have no meaning, and no gradient
    check(x, cu_seqlens=borders, write_chunk=chunk)


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_segments_do_not_change_what_is_withheld(chunk, qk_l2norm, within, device, monkeypatch):
    """Cut into segments; factors beyond 0 and 1 are not forgotten as early as those within."""
    monkeypatch.setattr(tuning, "gated_delta_rule_segment", lambda *_: 256)
    x = inputs(B=1, T=700, H=1, HV=1, K=64, V=64, N=1, chunk=chunk, dtype=torch.float32, device=device)
    if within:
        x["writes"] = x["writes"].sigmoid()
    if not qk_l2norm:
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    check(x, qk_l2norm=qk_l2norm, write_chunk=chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 128, 256])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (256, 256), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_agree_for_every_size_on_a_gpu(K, V, dtype, chunk):
    check(inputs(B=2, T=1000, H=2, HV=4, K=K, V=V, N=2, chunk=chunk, dtype=dtype, device="cuda"), write_chunk=chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("borders", [None, PACKED])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 64), (64, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_for_hopper_agree_on_a_gpu(K, V, dtype, borders):
    if GLUON.limit(torch.device("cuda", 0), dtype) is not None:
        pytest.skip("kernels in Gluon run on Hopper")
    cu_seqlens = None if borders is None else packed("cuda")
    B, N = (2, 2) if borders is None else (1, 6)
    x = inputs(B=B, T=330, H=2, HV=4, K=K, V=V, N=N, borders=cu_seqlens, dtype=dtype, device="cuda")
    check(x, impl="gluon", cu_seqlens=cu_seqlens)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("chunk", [64, 256])
def test_long_sequences_of_few_heads_agree_on_a_gpu(chunk, impl):
    if impl == "gluon" and (chunk > 64 or GLUON.limit(torch.device("cuda", 0), torch.bfloat16) is not None):
        pytest.skip("kernels in Gluon run on Hopper, for runs of a chunk")
    x = inputs(B=1, T=9000, H=1, HV=2, K=128, V=128, N=1, chunk=chunk, dtype=torch.bfloat16, device="cuda")
    x["writes"] = (x["writes"] > 0).float()
    check(x, impl=impl, write_chunk=chunk)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"writes": torch.ones(2, 3, 2)}, "writes"),
        ({"writes": torch.ones(2, 2, 1)}, "writes"),
        ({"writes": torch.ones(2, 2, 2, dtype=torch.int64)}, "writes"),
        ({"write_chunk": 32}, "write_chunk"),
        ({"write_chunk": 0}, "write_chunk"),
        ({"write_chunk": 96}, "write_chunk"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_malformed_writes_are_refused(form, change, words):
    x = inputs(T=100, K=4, V=4, dtype=torch.float32)
    with pytest.raises(ValueError, match=words):
        form(**(x | change))
