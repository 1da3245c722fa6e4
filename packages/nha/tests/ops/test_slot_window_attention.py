"""Slot-window attention on any device: the eager forms against the equations, the kernels against float64."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import ClassVar

import pytest
import torch

from tokenmix_core.ops import attention
from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.testing.agreement import assert_agrees, values_and_gradients, watched
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.operations import Call, KernelCase, OpContract, Results
from tokenmix_nha.ops import (
    SlotWindowState,
    log_forget_gates,
    slot_window_attention,
    slot_window_attention_prefill,
    slot_window_attention_step,
)
from tokenmix_nha.ops.slot_window import reference, step, tuning

PACKED = [0, 0, 9, 42, 42, 50]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(
    B=2, T=50, HQ=2, H=1, K=8, V=6, M=5, own_keys=False, dtype=torch.float64, device="cpu", gates="mixed", seed=0
):
    """Return random arguments by name. Gates: "weak" near 1, "mixed" mostly above 0.01, "hard" weak, some 0 or 1."""
    generator = torch.Generator(device).manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device=device, dtype=torch.float64)
    f = torch.nn.functional.logsigmoid(2 * randn(B, T, H, M))
    if gates != "mixed":
        f = f / 16
    if gates == "hard":
        f = torch.where(randn(f.shape) > 1, -1e4, torch.where(randn(f.shape) > 1, 0.0, f))
    x = {"q": randn(B, T, HQ, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V), "f": f}
    if own_keys:
        x |= {"q_slots": randn(B, T, HQ, K), "k_slots": randn(B, T, H, K)}
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: value.to(gate if name == "f" else dtype) for name, value in x.items()}


def loop_reference(
    q, k, v, f, q_slots, k_slots, slots_k, slots_v, start, *, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute equations 1 to 4 of the paper, token by token, with the token shift: the specification.

    `start` is the index of the first valid key of each sequence; the keys before it are padding. Return o and both
    slots.
    """
    queries, keys = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    index = torch.arange(keys, device=q.device)
    outputs = []

    def enter(j: int) -> tuple[torch.Tensor, torch.Tensor]:
        alpha = torch.where((j >= start)[:, None, None], f[:, j].exp(), 1)[..., None]
        return (
            alpha * slots_k + (1 - alpha) * k_slots[:, j, :, None],
            alpha * slots_v + (1 - alpha) * v_entering[:, j, :, None],
        )

    v_entering = v[:, :, ::group]
    for t in range(keys):
        if t >= window:
            slots_k, slots_v = enter(t - window)
        if (i := t - (keys - queries)) < 0:
            continue
        hidden = (index > t) | (index <= t - window) | (index < start[:, None])
        long = torch.einsum("nhd,nhmd->nhm", q_slots[:, i], slots_k.repeat_interleave(group, 1))
        short = torch.einsum("nhd,njhd->nhj", q[:, i], k).masked_fill(hidden[:, None], -math.inf)
        p = (scale * torch.cat([long, short], -1)).softmax(-1)
        p_long, p_short = p.split([long.shape[-1], keys], -1)
        o = torch.einsum("nhm,nhmd->nhd", p_long, slots_v.repeat_interleave(group, 1))
        outputs.append(o + torch.einsum("nhj,njhd->nhd", p_short, v))
    return torch.stack(outputs, 1), slots_k, slots_v


def tokens(x, begin, end):
    return {name: value[:, begin:end] for name, value in x.items()}


def token(x, t):
    return {name: value[:, t] for name, value in x.items()}


def carried(N, H, K, V, M, W, own_keys=False, dtype=torch.float64, device="cpu"):
    """Return a state's random tensors by name, and its lengths: rings are half full, just full, wrapped and empty."""
    generator = torch.Generator(device).manual_seed(1)
    randn = partial(torch.randn, generator=generator, device=device, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    length = torch.tensor([(W // 2, W, 3 * W + 1, 0)[n % 4] for n in range(N)], dtype=torch.int32, device=device)
    length = length[:, None].repeat(1, H)
    return {
        "slots_k": randn(N, H, M, K).to(wide), "slots_v": randn(N, H, M, V).to(wide),
        "ring_k": randn(N, W, H, K).to(dtype), "ring_v": randn(N, W, H, V).to(dtype),
        "ring_f": -randn(N, W, H, M).abs().to(wide),
    } | ({"ring_k_slots": randn(N, W, H, K).to(dtype)} if own_keys else {}), length  # fmt: skip


def gate_rounding(f):
    """Return the error of a gate if the sum of a chunk's 16 log2 gates, each at least −28, is rounded to float32."""
    log2 = (f.double() / math.log(2)).clamp(min=-28)
    return 2**-24 * math.log(2) * log2.unfold(1, min(16, f.shape[1]), 1).sum(-1).abs().max().item()


def attend(slots_k=None, slots_v=None, ring_k=None, ring_v=None, ring_f=None, ring_k_slots=None, length=None, **x):
    """Run the operation on tensors by name, including those of the carried state."""
    if slots_k is not None:
        x["initial_state"] = SlotWindowState(slots_k, slots_v, ring_k, ring_v, ring_f, ring_k_slots, length)
    return slot_window_attention(**x)


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def scans_of_segments(override):
    override(tuning, scan_config=lambda *_: tuning.ScanConfig(2, 3, 4, 1))


def tiles_wider_than_the_slots(override):
    override(tuning, slot_tile=lambda slots, *_: 2 * slots)


def slots_part_by_part(override):
    override(tuning, _SLOT_TILE=16)


def tiles_wider_than_memory(override):
    override(tuning, whole_tile=lambda *_: 32)
    override(tuning, tile=lambda *_: tuning.Tile(16, 32, 16, 4, 1))
    scans_of_segments(override)


def programs_of_several_heads(override):
    override(tuning, strong_heads=lambda *_: 2)


KERNELS = dict(B=1, HQ=1, H=1, K=64, V=64, M=16)


class TestSlotWindowAttention(OpContract):
    covers = (slot_window_attention, slot_window_attention_prefill, slot_window_attention_step)
    absent: ClassVar = {
        "step": "its state is a ring, which the tests below follow",
        "malformed_steps": "they are refused for the ring's sake: a test of its own",
    }
    forms: ClassVar = {"attention": attend}
    tokens = ("q", "k", "v", "f", "q_slots", "k_slots")
    state = ("initial_state", "final_state")
    final = ("slots_k", "slots_v")
    # 16-bit MMAs are tested on a GPU
    dtypes = ("float32",)
    cases: ClassVar = {
        f"{own or 'shared'} keys, a window of {window}": dict(T=25, HQ=4, H=2, window=window, own_keys=bool(own))
        for own in ("", "own")
        for window in (0, 1, 7, 30)
    }
    lengths = (1, 15, 16, 17, 33)
    kernels: ClassVar = {
        name: KernelCase(KERNELS | sizes, patch=patch)
        for name, sizes, patch in (
            ("slots alone", dict(T=70, window=0), None),
            ("window, grouped heads", dict(T=50, HQ=2, window=20), None),
            ("own keys", dict(T=40, own_keys=True, window=5), None),
            ("carried", dict(B=2, T=20, own_keys=True, window=18, ring=18), None),
            ("carried, wide", dict(B=3, T=5, window=9, ring=18), None),
            ("hard gates", dict(T=40, gates="hard", window=4), None),
            ("packed", dict(window=7, ring=7, boundaries=PACKED), None),
            ("full window", dict(B=2, T=65, HQ=2, window=65), None),
            ("full window, packed", dict(HQ=2, window=65, boundaries=[0, 30, 30, 65]), None),
            ("scans of segments", dict(T=60, window=4, ring=4), scans_of_segments),
            ("tiles wider than the slots", dict(T=30, window=4, ring=4), tiles_wider_than_the_slots),
            ("slots part by part", dict(T=30, M=32, window=4), slots_part_by_part),
            ("tiles wider than memory", dict(T=60, gates="hard", window=4, ring=4), tiles_wider_than_memory),
            ("programs of several heads", dict(T=40, HQ=3, H=3, window=4, gates="uneven"), programs_of_several_heads),
        )
    }
    parts: ClassVar = {f"a window of {window}": dict(T=30, window=window, own_keys=True) for window in (0, 7, 100)}
    packed: ClassVar = {
        f"a window of {window}": dict(window=window, own_keys=True, boundaries=[0, 0, 9, 10, 42, 42, 50])
        for window in (0, 6, 100)
    }
    neighbours: ClassVar = KERNELS | dict(B=3, T=7, window=3)
    laid: ClassVar = {"carried": KERNELS | dict(T=3, own_keys=True, window=3, ring=3)}
    on_gpu: ClassVar = {f"{M} slots": dict(T=150, HQ=4, H=2, K=64, V=64, M=M, window=40) for M in (32, 64)}
    traced: ClassVar = KERNELS | dict(window=3)
    # more tokens than the window: a window of all tokens runs core's attention, which is another graph
    traced_lengths = (5, 9)
    replayed: ClassVar = KERNELS | dict(T=7, window=3)
    valid: ClassVar = dict(T=8, window=3)
    malformed: ClassVar = {
        "a negative window": ({"window": -1}, "window must be an integer of at least 0, got -1"),
        "a window of a float": ({"window": 2.0}, "window must be an integer"),
        "a window that is a truth": ({"window": True}, "window must be an integer"),
        "keys of another length": (
            {"k": z(2, 7, 1, 8)}, r"k must have shape \[B, T, H, K\] with B=2, T=8, K=8, H=1, got \[2, 7, 1, 8\]"
        ),
        "heads that do not divide": ({"q": z(2, 8, 3, 8), "k": z(2, 8, 2, 8)}, "H=2"),
        "gates without slots": ({"f": z(2, 8, 1)}, "f must have shape"),
        "no gates": ({"f": None}, "f must be a tensor .*, got None"),
        "mixed dtypes": ({"v": z(2, 8, 1, 6, dtype=torch.float16)}, "must share one dtype"),
        "integer gates": ({"f": z(2, 8, 1, 5, dtype=torch.int64)}, "f must be"),
        "queries of the slots alone": ({"q_slots": z(2, 8, 2, 8)}, "q_slots without k_slots"),
        "a scale of zero": ({"scale": 0.0}, "scale must be positive"),
        "an infinite scale": ({"scale": float("inf")}, "scale must be a finite number, got inf"),
        "a scale in words": ({"scale": "half"}, "scale must be a finite number, got 'half'"),
        "packed rows": ({"cu_seqlens": torch.tensor([0, 8])}, "a packed batch has B = 1"),
        "an unknown implementation": ({"impl": "cuda"}, "impl must be None or one of"),
        "heads without a kernel": ({"impl": "triton"}, "needs K in 64, 128, got K=8"),
        "a tensor for a state": ({"initial_state": z(3)}, "SlotWindowState, got Tensor"),
        "a state of other rows": (
            {"initial_state": SlotWindowState.zeros(3, 1, 5, 8, 6, 4)}, "state.slots_k must have shape"
        ),
        "a state with keys of its own": (
            {"initial_state": SlotWindowState.zeros(2, 1, 5, 8, 6, 4, own_slot_keys=True)}, "made with k_slots"
        ),
        "a state of another dtype": (
            {"initial_state": SlotWindowState.zeros(2, 1, 5, 8, 6, 4, dtype=torch.bfloat16)}, "must share one dtype"
        ),
    }  # fmt: skip

    @staticmethod
    def results(output):
        state = output.final_state
        return {"o": output.o, "slots_k": state.slots_k, "slots_v": state.slots_v}

    def make(
        self, dtype=torch.float64, device="cpu", seed=0, window=4, boundaries=None, ring=None, gates="mixed", **sizes
    ) -> Call:
        options = {"window": window, "scale": 0.4}
        if boundaries is not None:
            options["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32, device=device)
            sizes |= {"B": 1, "T": boundaries[-1]}
        x = inputs(**sizes, gates="mixed" if gates == "uneven" else gates, dtype=dtype, device=device, seed=seed)
        if gates == "uneven":
            x["f"][:, 20:, 1] -= 20
        if ring is not None:
            (B, _, H, M), K, V = x["f"].shape, x["k"].shape[3], x["v"].shape[3]
            rows = B if boundaries is None else len(boundaries) - 1
            old, options["length"] = carried(rows, H, K, V, M, ring, "k_slots" in x, dtype=dtype, device=device)
            x |= old
        return Call(x, options)

    def definition(self, q, k, v, f, *, window, scale, q_slots=None, k_slots=None):
        """Equations 1 to 4, token by token."""
        (B, T, HQ, K), (H, M) = q.shape, f.shape[2:]
        q_slots, k_slots = (q, k) if q_slots is None else (q_slots, k_slots)
        slots_k, slots_v, outputs = k.new_zeros(B, H, M, K), v.new_zeros(B, H, M, v.shape[3]), []
        for t in range(T):
            if t >= window:
                alpha = f[:, t - window].exp().unsqueeze(3)
                slots_k = alpha * slots_k + (1 - alpha) * k_slots[:, t - window].unsqueeze(2)
                slots_v = alpha * slots_v + (1 - alpha) * v[:, t - window].unsqueeze(2)
            near = slice(max(t - window + 1, 0), t + 1)
            keys, values, long_k, long_v = (
                x.repeat_interleave(HQ // H, 1)
                for x in (k[:, near].transpose(1, 2), v[:, near].transpose(1, 2), slots_k, slots_v)
            )
            slot_logits = (long_k @ q_slots[:, t].unsqueeze(3)).squeeze(3)
            logits = torch.cat((slot_logits, (keys @ q[:, t].unsqueeze(3)).squeeze(3)), 2)
            weights = (scale * logits).softmax(2).unsqueeze(2)
            outputs.append((weights @ torch.cat((long_v, values), 2)).squeeze(2))
        state = SlotWindowState(slots_k, slots_v, k, v, f, None, torch.tensor(T))
        return ScanOutput(torch.stack(outputs, 1), state)

    def assert_kernels_agree(self, kernels, reference, call):
        least = max(gate_rounding(call.tensors[name]) for name in ("ring_f", "f") if name in call.tensors)
        floor = lambda name, eps: max(least, eps)  # noqa: E731
        assert_agrees(kernels, reference, call.tensors, floor=floor)

    def operators(self, device):
        from tokenmix_nha.ops.slot_window.autograd import (
            slot_window_attention_backward_op,
            slot_window_attention_op,
            slot_window_prefill_op,
        )
        from tokenmix_nha.ops.slot_window.prefix import _prefix_op

        x = inputs(T=20, **KERNELS, dtype=torch.float32, device=device)
        arguments = (*x.values(), None, None, None, None, None, None, 0, 4, 0.1, None)
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        yield slot_window_attention_op, arguments, *tests
        o, _, _, kept = slot_window_attention_op(*arguments)
        yield slot_window_attention_backward_op, (*arguments, o, kept, o, None, None, False), *tests
        yield _prefix_op, (x["q"], x["k"], x["v"], None, 3, 0.1, "triton"), *tests
        state, length = carried(1, 1, 64, 64, 16, 4, dtype=torch.float32, device=device)
        for normalizer in (None, 8.0):
            given = (*token(x, 0).values(), None, None, *state.values(), None, length, None, 0.1, normalizer, True)
            yield step._step_op, given, "test_schema", "test_faketensor"
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        given = (*x.values(), None, None, None, *state.values(), None, length, slots, None, 0.1, "triton")
        yield slot_window_prefill_op, given, "test_schema", "test_faketensor"


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("window", [0, 1, 7, 16, 33, 60])
@pytest.mark.parametrize("before", [0, 7])
def test_the_chunkwise_reference_equals_the_loop(window, before, own_keys):
    x = inputs(T=45 + before, HQ=4, H=2, own_keys=own_keys)
    q, q_slots = (x[name][:, before:] for name in ("q", "q_slots" if own_keys else "q"))
    k_slots = x["k_slots" if own_keys else "k"]
    old, _ = carried(2, 2, 8, 6, 5, 4)
    start = torch.tensor([0, before // 2])
    arguments = (q, x["k"], x["v"], x["f"], q_slots, k_slots, old["slots_k"], old["slots_v"], start)
    loop = loop_reference(*arguments, window=window, scale=0.4)
    chunks = reference.chunk_reference(*arguments, window=window, scale=0.4)
    for a, b in zip(loop, chunks, strict=True):
        assert relative_error(b, a) < 1e-12


# ---- properties ----


def test_a_full_window_equals_attention_with_zero_keys_before_it():
    """Compare values and gradients; check that a window shorter by one token differs."""
    x = inputs(T=20, K=8, V=8)

    def prefixed(q, k, v, f):
        zeros = k.new_zeros(2, 5, 1, 8)
        q, k, v = torch.cat([q.new_zeros(2, 5, 2, 8), q], 1), torch.cat([zeros, k], 1), torch.cat([zeros, v], 1)
        return Results(o=attention(q, k, v, impl="reference").o[:, 5:] + 0 * f.sum())

    exact, upstream = values_and_gradients(prefixed, x)
    for window in (20, 1000):
        full = lambda window=window, **x: Results(o=slot_window_attention(**x, window=window)[0] + 0 * x["f"].sum())  # noqa: E731
        got, _ = values_and_gradients(full, x, upstream)
        for name in exact:
            assert relative_error(got[name], exact[name]) < 1e-12, name
    assert relative_error(slot_window_attention(**x, window=19)[0], exact["o"]) > 1e-6


def test_gates_of_one_keep_the_slots_and_gates_of_zero_replace_them():
    x = inputs(T=30, gates="weak")
    _, state = slot_window_attention(**x | {"f": torch.zeros_like(x["f"])}, window=4)
    assert (state.slots_k == 0).all()
    assert (state.slots_v == 0).all()
    _, state = slot_window_attention(**x | {"f": torch.full_like(x["f"], -1e4)}, window=4)
    torch.testing.assert_close(state.slots_k, x["k"][:, 25].unsqueeze(2).expand_as(state.slots_k))


@pytest.mark.parametrize("window", [0, 5])
def test_no_output_depends_on_later_tokens(window):
    x = inputs()
    o = slot_window_attention(**x, window=window)[0]
    changed = {name: torch.cat([value[:, :20], value[:, 20:].flip(1)], 1) for name, value in x.items()}
    torch.testing.assert_close(slot_window_attention(**changed, window=window)[0][:, :20], o[:, :20])


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("window", [0, 1, 8, 33, 100])
def test_calls_on_parts_of_a_sequence_and_steps_equal_one_call(window, own_keys):
    x = inputs(T=50, own_keys=own_keys)
    whole, last = slot_window_attention(**x, window=window)
    outputs, state = [], None
    for begin, end in ((0, 20), (20, 21), (21, 40)):
        o, state = slot_window_attention(**tokens(x, begin, end), window=window, initial_state=state)
        outputs.append(o)
    state = state.reserve(window)
    size = state.bytes()
    for t in range(40, 50):
        outputs.append(slot_window_attention_step(**token(x, t), state=state).unsqueeze(1))
    assert relative_error(torch.cat(outputs, 1), whole) < 1e-12
    assert relative_error(state.slots_v, last.slots_v) < 1e-12 or window == 100
    assert state.bytes() == size
    for a, b in zip(state.unrolled(), last.reserve(window).unrolled(), strict=True):
        if a is not None:
            torch.testing.assert_close(a[:, : min(window, 50)], b[:, : min(window, 50)])


@pytest.mark.operation
@pytest.mark.parametrize("window", [0, 3])
def test_steps_compute_gates_from_logits(window, device):
    x = inputs(T=6, **KERNELS, dtype=torch.float32, device=device)
    f = 40 * torch.randn(x["f"].shape, generator=torch.Generator().manual_seed(1)).to(device)
    gates = log_forget_gates(f, normalizer=4.0)
    for impl in ("triton", "reference"):
        states = [SlotWindowState.zeros(1, 1, 16, 64, 64, window, device=device) for _ in range(2)]
        for t in range(6):
            given = token(x, t)
            got = slot_window_attention_step(**given | {"f": f[:, t]}, state=states[0], normalizer=4.0, impl=impl)
            wanted = slot_window_attention_step(**given | {"f": gates[:, t]}, state=states[1], impl=impl)
            torch.testing.assert_close(got, wanted)
        for a, b in zip(*states, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)


def test_a_normalizer_that_is_not_positive_and_finite_is_refused():
    x = inputs(T=1)
    state = SlotWindowState.zeros(2, 1, 5, 8, 6, 3, dtype=torch.float64)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="normalizer must be positive"):
            slot_window_attention_step(**token(x, 0), state=state, normalizer=bad)


def test_a_state_continues_with_another_window():
    """If the next window is smaller, the surplus tokens enter the slots; if larger, tokens in the slots stay there."""
    x = inputs(T=40)
    _, state = slot_window_attention(**tokens(x, 0, 30), window=20)
    narrow, _ = slot_window_attention(**tokens(x, 30, 40), window=3, initial_state=state)
    whole, _ = slot_window_attention(**x, window=3)
    assert relative_error(narrow, whole[:, 30:]) < 1e-12
    _, state = slot_window_attention(**tokens(x, 0, 30), window=3)
    wide, _ = slot_window_attention(**tokens(x, 30, 33), window=8, initial_state=state)
    assert torch.isfinite(wide).all()


@pytest.mark.parametrize("window", [0, 6, 100])
def test_packed_sequences_never_mix(window):
    x = inputs(B=1, T=50, own_keys=True)
    boundaries = torch.tensor(PACKED, dtype=torch.int32)
    first, state = slot_window_attention(**x, window=window, cu_seqlens=boundaries)
    second, state = slot_window_attention(**x, window=window, cu_seqlens=boundaries, initial_state=state)
    for n, (begin, end) in enumerate(itertools.pairwise(PACKED)):
        if begin == end:
            continue
        a, alone = slot_window_attention(**tokens(x, begin, end), window=window)
        b, alone = slot_window_attention(**tokens(x, begin, end), window=window, initial_state=alone)
        assert relative_error(first[:, begin:end], a) < 1e-12
        assert relative_error(second[:, begin:end], b) < 1e-12
        assert relative_error(state.slots_k[n], alone.slots_k[0]) < 1e-12 or window == 100
        assert torch.equal(state.length[n], alone.length[0])


@torch.no_grad()
def test_unused_entries_of_a_state_hold_no_values_of_other_sequences():
    x = {name: value[:1] for name, value in inputs(T=12).items()}
    for name in ("k", "v"):
        x[name][:, 3:] = float("nan")
    options = {"window": 5, "output_final_state": True}
    state = slot_window_attention(**x, cu_seqlens=torch.tensor([0, 3, 12]), **options).final_state
    assert state.k[0].isfinite().all()
    assert state.v[0].isfinite().all()
    # a step on rows of which one holds NaN
    one = {name: value[:, :1].expand(2, -1, -1, -1) for name, value in inputs(B=1, seed=1).items()}
    after = slot_window_attention(**one, initial_state=state, **options).final_state
    assert after.k[0].isfinite().all()
    assert after.v[0].isfinite().all()


def test_extreme_gates_give_finite_gradients():
    x = inputs(gates="hard")
    results, _ = values_and_gradients(lambda **x: Results(o=slot_window_attention(**x, window=3)[0]), x)
    assert all(torch.isfinite(value).all() for value in results.values())


# ---- kernels ----


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("inside", [512, 2])
def test_the_step_kernel_equals_one_call(monkeypatch, inside, own_keys):
    monkeypatch.setattr(step, "_RING_INSIDE", inside)
    x = inputs(T=24, HQ=2, K=64, V=64, M=16, own_keys=own_keys, dtype=torch.float32, device=DEVICE)
    for window in (0, 5, 40):
        whole, _ = slot_window_attention(**x, window=window, impl="reference")
        _, state = slot_window_attention(**tokens(x, 0, 18), window=window, impl="reference")
        state = state.reserve(window)
        for t in range(18, 24):
            o = slot_window_attention_step(**token(x, t), state=state, impl="triton")
            assert relative_error(o, whole[:, t]) < 2e-6


def test_a_dispatch_mode_sees_the_backward_op():
    x = inputs(B=1, T=9, HQ=1, K=64, V=64, M=16, dtype=torch.float32, device=DEVICE)
    leaves = [value.requires_grad_() for value in x.values() if value is not None]
    o = slot_window_attention(**x, window=4, output_final_state=False, impl="triton").o
    wanted = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    got, seen = watched(lambda: torch.autograd.grad(o.sum(), leaves))
    assert "tokenmix_nha.slot_window_attention_backward.default" in seen
    assert all(map(torch.equal, got, wanted))


# ---- errors ----


def test_a_step_refuses_a_state_it_cannot_update():
    x = token(inputs(T=3, dtype=torch.float32), 0)
    state = SlotWindowState.zeros(2, 1, 5, 8, 6, 4)
    with pytest.raises(ValueError, match="must be contiguous"):
        slot_window_attention_step(**x, state=state._replace(k=state.k.repeat(1, 1, 1, 2)[..., ::2]))
    with pytest.raises(ValueError, match="at least the ring's 4 tokens, got 3"):
        state.reserve(3)
