"""Write gates: the writes of a chunk enter the state by a factor."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch

from support.refused import refused_on_3_8
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops import chunk_gated_delta_rule, recurrent_gated_delta_rule
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.plan import GLUON
from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.testing.agreement import RoundedProducts, assert_agrees, granted_to_sums, values_and_gradients
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.operations import Call, KernelCase, OpContract

PACKED = [0, 0, 1, 64, 64, 129, 330]
FORMS = [chunk_gated_delta_rule, recurrent_gated_delta_rule]


def inputs(
    B=2, T=70, H=1, HV=2, K=16, V=16, N=None, boundaries=None, chunk=64, dtype=torch.float64, device="cpu", seed=0
):
    """Random arguments by name, with a factor of any sign for each chunk's writes."""
    generator = torch.Generator(device).manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device=device)
    rand = partial(torch.rand, generator=generator, device=device)
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    slots = chunk_slots(1, T, chunk, boundaries) if boundaries is not None else -(-T // chunk)
    x = {
        "q": randn(B, T, H, K).to(dtype),
        "k": randn(B, T, H, K).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": (-0.1 * rand(B, T, HV)).to(gate),
        "beta": (2 * rand(B, T, HV)).to(gate),
        "writes": randn(B, slots, HV).to(gate),
    }
    return x | ({"initial_state": randn(N, HV, K, V).to(gate)} if N else {})


class TestWithheldWrites(OpContract):
    covers = (chunk_gated_delta_rule, recurrent_gated_delta_rule)
    absent: ClassVar = {
        "parts": "a piece ends where a run of chunks does, which is a test of its own",
        "step": "a token alone is no run of chunks",
        "malformed_steps": "no steps",
    }
    forms: ClassVar = {"chunks": chunk_gated_delta_rule, "tokens": recurrent_gated_delta_rule}
    tokens = ("q", "k", "v", "g", "beta")
    state = ("initial_state", "final_state")
    dtypes = ("float32",)
    cases: ClassVar = {
        "runs of a chunk": dict(T=200, K=4, V=3, N=2),
        "runs of two chunks": dict(T=330, K=4, V=3, N=2, chunk=128),
        "runs of three chunks": dict(T=200, K=4, V=3, chunk=192),
    }
    lengths = (1, 63, 64, 65, 129)
    kernels: ClassVar = {
        "runs of a chunk": KernelCase(dict(T=200, K=64, V=64, N=2)),
        "runs of two chunks": KernelCase(dict(T=200, K=64, V=64, N=2, chunk=128)),
        "by tokens": KernelCase(dict(T=140, K=64, V=64, N=2), "tokens"),
        # slots without a chunk have no meaning, and no gradient
        "packed": KernelCase(dict(K=64, V=64, N=6, boundaries=PACKED)),
        "packed runs of two chunks": KernelCase(dict(K=64, V=64, N=6, boundaries=PACKED, chunk=128)),
    }
    packed: ClassVar = {"of documents": dict(K=4, V=4, N=6, boundaries=PACKED, chunk=128)}
    neighbours: ClassVar = dict(B=3, T=3, HV=1, K=64, V=64, N=3)
    on_gpu: ClassVar = {"heads of 128": dict(B=2, T=150, HV=2, K=128, V=128, N=2)}
    traced: ClassVar = dict(B=1, HV=1, K=64, V=64, N=1)
    replayed: ClassVar = dict(B=1, T=3, HV=1, K=64, V=64, N=1)
    valid: ClassVar = dict(T=100, K=4, V=4)
    malformed: ClassVar = {
        "too many runs": ({"writes": torch.ones(2, 3, 2)}, "writes must have shape"),
        "other heads": ({"writes": torch.ones(2, 2, 1)}, "writes must have shape"),
        "integers": ({"writes": torch.ones(2, 2, 2, dtype=torch.int64)}, "writes must be .*got int64"),
        "runs of half a chunk": ({"write_chunk": 32}, "write_chunk must be a multiple of 64, got 32"),
        "runs of nothing": ({"write_chunk": 0}, "write_chunk must be a multiple of 64, got 0"),
        "runs of a chunk and a half": ({"write_chunk": 96}, "write_chunk must be a multiple of 64, got 96"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, boundaries=None, chunk=64, **sizes) -> Call:
        options = {"scale": 0.5, "qk_l2norm": True, "write_chunk": chunk}
        if boundaries is not None:
            options["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32, device=device)
            sizes |= {"B": 1, "T": boundaries[-1], "boundaries": options["cu_seqlens"]}
        return Call(inputs(**sizes, chunk=chunk, dtype=dtype, device=device, seed=seed), options)

    def definition(self, q, k, v, g, beta, writes, *, scale, qk_l2norm, write_chunk, initial_state=None):
        """A run starts from the true state, and what it writes then enters that by a share."""
        B, T, HV, V = v.shape
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
        S = v.new_zeros(B, HV, q.shape[3], V) if initial_state is None else initial_state
        outputs = []
        for run, first in enumerate(range(0, T, write_chunk)):
            inside, kept = S, S
            for t in range(first, min(first + write_chunk, T)):
                decay, kt = g[:, t].exp()[..., None, None], k[:, t].unsqueeze(3)
                inside, kept = decay * inside, decay * kept
                wrong = v[:, t].unsqueeze(2) - kt.mT @ inside
                inside = inside + kt @ (beta[:, t, :, None, None] * wrong)
                outputs.append(scale * (q[:, t].unsqueeze(2) @ inside).squeeze(2))
            S = kept + writes[:, run, :, None, None] * (inside - kept)
        return ScanOutput(torch.stack(outputs, 1), S)

    def document(self, arguments, n, start, stop):
        alone = super().document(arguments, n, start, stop)
        # of a packed batch, slots are numbered by tokens and documents
        chunk = arguments["write_chunk"]
        first = start // chunk + n
        return alone | {"writes": arguments["writes"][:, first : first - (start - stop) // chunk]}

    def operators(self, device):
        from tokenmix_core.ops.gated_delta_rule import autograd as ops

        x = inputs(B=1, T=2, HV=1, K=64, V=64, N=1, dtype=torch.float32, device=device)
        writes = x.pop("writes").requires_grad_()
        arguments = tuple(value.requires_grad_() for value in x.values())
        for op in (ops.chunk_op, ops.recurrent_op):
            yield op, (*arguments, writes, None, 0.5, True, None, 64), "test_schema", "test_faketensor"


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
        # with 16-bit matmuls, too
        got, upstream = values_and_gradients(function, x)
        exact, _ = values_and_gradients(reference, x, upstream, dtype=torch.float64)
        with RoundedProducts(dtype):
            rounded, _ = values_and_gradients(reference, x, upstream)
        for name, value in got.items():
            assert_within(name, value, exact[name], rounded[name], floor=torch.finfo(dtype).eps / 2)
        return
    # a factor's gradient is one sum over a chunk's tokens and channels
    assert_agrees(function, reference, x, floor=granted_to_sums("dwrites"))


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_segments_do_not_change_gated_writes(chunk, qk_l2norm, within, device, override):
    """Segments agree; decays bound factors in [0, 1] only."""
    override(tuning, segment_tokens=lambda *_: 256)
    x = inputs(B=1, T=700, H=1, HV=1, K=64, V=64, N=1, chunk=chunk, dtype=torch.float32, device=device)
    if within:
        x["writes"] = x["writes"].sigmoid()
    if not qk_l2norm:
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    check(x, qk_l2norm=qk_l2norm, write_chunk=chunk)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("chunk", "dtype"),
    [(64, torch.bfloat16), (64, torch.float32), (128, torch.float16), (128, torch.bfloat16), (256, torch.float32)],
)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (256, 256), (64, 128)])
def test_kernels_agree_for_every_size_on_a_gpu(K, V, dtype, chunk):
    x = inputs(B=2, T=1000, H=2, HV=4, K=K, V=V, N=2, chunk=chunk, dtype=dtype, device="cuda")
    with refused_on_3_8(K, dtype):
        check(x, write_chunk=chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("boundaries", [None, PACKED])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (128, 64), (64, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_for_hopper_agree_on_a_gpu(K, V, dtype, boundaries):
    if GLUON.limit(torch.device("cuda", 0), dtype) is not None:
        pytest.skip("kernels in Gluon run on Hopper")
    cu_seqlens = None if boundaries is None else torch.tensor(PACKED, dtype=torch.int32, device="cuda")
    B, N = (2, 2) if boundaries is None else (1, 6)
    x = inputs(B=B, T=330, H=2, HV=4, K=K, V=V, N=N, boundaries=cu_seqlens, dtype=dtype, device="cuda")
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
