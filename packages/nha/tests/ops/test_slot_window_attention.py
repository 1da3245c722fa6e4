"""Slot-window attention on any device: the eager forms against the equations, the kernels against float64."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from tokenmix_core.ops import attention
from tokenmix_core.testing.agreement import values_and_gradients, watched
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_nha.ops import SlotWindowState, slot_window_attention, slot_window_attention_step
from tokenmix_nha.ops.slot_window import reference, step, tuning

PACKED = [0, 0, 9, 42, 42, 50]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(B=2, T=50, HQ=2, H=1, K=8, V=6, M=5, own_keys=False, dtype=torch.float64, device="cpu", gates="mixed"):
    """Random arguments by name. Gates: "weak" near 1, "mixed" from 0.01 to 1, "hard" some exp(−10⁴) and some 1."""
    generator = torch.Generator(device).manual_seed(0)
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


def tokens(x, begin, end):
    return {name: value[:, begin:end] for name, value in x.items()}


def token(x, t):
    return {name: value[:, t] for name, value in x.items()}


def carried(N, H, K, V, M, W, own_keys=False, dtype=torch.float64, device="cpu"):
    """A state with random slots and rings that are partly empty, just full, and wrapped."""
    generator = torch.Generator(device).manual_seed(1)
    randn = partial(torch.randn, generator=generator, device=device, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    length = torch.tensor([(W // 2, W, 3 * W + 1, 0)[n % 4] for n in range(N)], dtype=torch.int32, device=device)
    return {
        "slots_k": randn(N, H, M, K).to(wide), "slots_v": randn(N, H, M, V).to(wide),
        "ring_k": randn(N, W, H, K).to(dtype), "ring_v": randn(N, W, H, V).to(dtype),
        "ring_f": -randn(N, W, H, M).abs().to(wide),
    } | ({"ring_k_slots": randn(N, W, H, K).to(dtype)} if own_keys else {}), length  # fmt: skip


def gate_rounding(f):
    """What rounding exponents costs: a chunk of 16 tokens in float32 cumulates its log2 gates, each at least −28."""
    log2 = (f.double() / math.log(2)).clamp(min=-28)
    return 2**-24 * math.log(2) * log2.unfold(1, min(16, f.shape[1]), 1).sum(-1).abs().max().item()


def check(run, x):
    """The kernels err at most twice as much as the eager form in the same dtype, against it in float64."""
    got, upstream = values_and_gradients(run("triton"), x)
    exact, _ = values_and_gradients(run("reference"), x, upstream, dtype=torch.float64)
    eager, _ = values_and_gradients(run("reference"), x, upstream)
    floor = max(gate_rounding(x[name]) for name in ("ring_f", "f") if name in x)
    for name in exact:
        assert_within(name, got[name], exact[name], eager[name], floor=floor)


def call(window, cu_seqlens, length, impl):
    """The operation as a function of tensors by name, the carried state's included, that returns all it computes."""

    def run(ring_k_slots=None, **x):
        old = [x.pop(name) for name in ("slots_k", "slots_v", "ring_k", "ring_v", "ring_f") if name in x]
        state = SlotWindowState(*old, ring_k_slots, length) if old else None
        return slot_window_attention(**x, window=window, initial_state=state, cu_seqlens=cu_seqlens, impl=impl)

    def flat(**x):
        o, state = run(**x)
        present = {name: value for name, value in state._asdict().items() if name in ("slots_k", "slots_v", "v", "f")}
        return _Results({"o": o} | present)

    return flat


class _Results(dict):
    """Results by name, as `values_and_gradients` expects them."""

    def _asdict(self):
        return dict(self)


# ---- the definition ----


def test_the_loop_is_the_equations():
    """Equations 1 to 4 for one head, written out."""
    x = inputs(B=1, T=6, HQ=1, H=1, K=3, V=2, M=2)
    q, k, v, alpha = (x[name][0, :, 0] for name in "qkvf")
    alpha, w = alpha.exp(), 2
    K_long, V_long, outputs = torch.zeros(2, 3).double(), torch.zeros(2, 2).double(), []
    for t in range(6):
        if t >= w:
            a = alpha[t - w].diag()
            K_long = a @ K_long + torch.outer(1 - alpha[t - w], k[t - w])
            V_long = a @ V_long + torch.outer(1 - alpha[t - w], v[t - w])
        K_all = torch.cat([K_long, k[max(t - w + 1, 0) : t + 1]])
        V_all = torch.cat([V_long, v[max(t - w + 1, 0) : t + 1]])
        outputs.append(torch.softmax(K_all @ q[t] * 0.7, 0) @ V_all)
    o, state = slot_window_attention(**x, window=w, scale=0.7)
    torch.testing.assert_close(o[0, :, 0], torch.stack(outputs))
    torch.testing.assert_close(state.slots_k[0, 0], K_long)
    torch.testing.assert_close(state.slots_v[0, 0], V_long)


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("window", [0, 1, 7, 16, 33, 60])
@pytest.mark.parametrize("before", [0, 7])
def test_chunkwise_form_equals_the_loop(window, before, own_keys):
    x = inputs(T=45 + before, HQ=4, H=2, own_keys=own_keys)
    q, q_slots = (x[name][:, before:] for name in ("q", "q_slots" if own_keys else "q"))
    k_slots = x["k_slots" if own_keys else "k"]
    old, _ = carried(2, 2, 8, 6, 5, 4)
    start = torch.tensor([0, before // 2])
    arguments = (q, x["k"], x["v"], x["f"], q_slots, k_slots, old["slots_k"], old["slots_v"], start)
    loop = reference.loop_reference(*arguments, window=window, scale=0.4)
    chunks = reference.chunk_reference(*arguments, window=window, scale=0.4)
    for a, b in zip(loop, chunks, strict=True):
        assert relative_error(b, a) < 1e-12


def test_eager_gradients_are_those_of_finite_differences():
    x = inputs(B=1, T=4, HQ=2, H=1, K=2, V=2, M=2)
    run = lambda q, k, v, f: slot_window_attention(q, k, v, f, window=2)[0]  # noqa: E731
    assert torch.autograd.gradcheck(run, [value.requires_grad_() for value in x.values()])


# ---- properties ----


def test_a_full_window_is_attention_behind_zero_slots():
    """Values and gradients; a window one shorter differs, so the test can fail."""
    x = inputs(T=20, K=8, V=8)

    def prefixed(q, k, v, f):
        zeros = k.new_zeros(2, 5, 1, 8)
        q, k, v = torch.cat([q.new_zeros(2, 5, 2, 8), q], 1), torch.cat([zeros, k], 1), torch.cat([zeros, v], 1)
        return _Results(o=attention(q, k, v, impl="reference").o[:, 5:] + 0 * f.sum())

    exact, upstream = values_and_gradients(prefixed, x)
    for window in (20, 1000):
        full = lambda window=window, **x: _Results(o=slot_window_attention(**x, window=window)[0] + 0 * x["f"].sum())  # noqa: E731
        got, _ = values_and_gradients(full, x, upstream)
        for name in exact:
            assert relative_error(got[name], exact[name]) < 1e-12, name
    assert relative_error(slot_window_attention(**x, window=19)[0], exact["o"]) > 1e-6


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_behind_a_full_window_agrees_with_the_equations(packed):
    borders = torch.tensor([0, 30, 30, 65], dtype=torch.int32) if packed else None
    x = inputs(B=1 if packed else 2, T=65, K=64, V=64, M=16, dtype=torch.float32)

    def run(impl, **x):
        o = slot_window_attention(**x, window=65, impl=impl, cu_seqlens=borders, output_final_state=False).o
        return _Results(o=o + 0 * x["f"].sum())

    got, upstream = values_and_gradients(partial(run, "triton"), x)
    exact, _ = values_and_gradients(partial(run, "reference"), x, upstream, dtype=torch.float64)
    eager, _ = values_and_gradients(partial(run, "reference"), x, upstream)
    for name in exact:
        assert_within(name, got[name], exact[name], eager[name])


def test_open_gates_let_nothing_in_and_closed_ones_replace():
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
def test_pieces_and_steps_equal_the_whole(window, own_keys):
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


def test_a_state_continues_under_another_window():
    """A narrower window takes the surplus into the slots; what is in the slots stays there under a wider one."""
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
    borders = torch.tensor(PACKED, dtype=torch.int32)
    first, state = slot_window_attention(**x, window=window, cu_seqlens=borders)
    second, state = slot_window_attention(**x, window=window, cu_seqlens=borders, initial_state=state)
    for n, (begin, end) in enumerate(itertools.pairwise(PACKED)):
        if begin == end:
            continue
        a, alone = slot_window_attention(**tokens(x, begin, end), window=window)
        b, alone = slot_window_attention(**tokens(x, begin, end), window=window, initial_state=alone)
        assert relative_error(first[:, begin:end], a) < 1e-12
        assert relative_error(second[:, begin:end], b) < 1e-12
        assert relative_error(state.slots_k[n], alone.slots_k[0]) < 1e-12 or window == 100
        assert state.length[n] == alone.length[0]


def test_extreme_gates_give_finite_gradients():
    x = inputs(gates="hard")
    results, _ = values_and_gradients(lambda **x: _Results(o=slot_window_attention(**x, window=3)[0]), x)
    assert all(torch.isfinite(value).all() for value in results.values())


# ---- kernels ----

KERNEL_CASES = {
    "slots alone": (dict(T=70), 0, False),
    "window, grouped heads": (dict(T=50, HQ=2), 20, False),
    "own keys": (dict(T=40, own_keys=True), 5, False),
    "carried": (dict(B=2, T=20, own_keys=True), 18, True),
    "carried, wide": (dict(B=3, T=5), 9, True),
    "hard gates": (dict(T=40, gates="hard"), 4, False),
}


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernels_agree_with_the_equations(case):
    sizes, window, state = KERNEL_CASES[case]
    sizes = dict(B=1, HQ=1, H=1, K=64, V=64, M=16) | sizes
    x, length = inputs(**sizes, dtype=torch.float32, device=DEVICE), None
    if state:
        old, length = carried(
            sizes["B"], 1, 64, 64, 16, 18, sizes.get("own_keys", False), dtype=torch.float32, device=DEVICE
        )
        x |= old
    check(partial(call, window, None, length), x)


def test_kernels_agree_on_packed_batches():
    x = inputs(B=1, T=50, HQ=1, K=64, V=64, M=16, dtype=torch.float32, device=DEVICE)
    borders = torch.tensor(PACKED, dtype=torch.int32, device=DEVICE)
    old, length = carried(5, 1, 64, 64, 16, 7, dtype=torch.float32, device=DEVICE)
    check(partial(call, 7, borders, length), x | old)


def test_segments_change_nothing(monkeypatch):
    x = inputs(B=1, T=60, HQ=1, K=64, V=64, M=16, dtype=torch.float32, device=DEVICE)
    old, length = carried(1, 1, 64, 64, 16, 4, dtype=torch.float32, device=DEVICE)
    monkeypatch.setattr(tuning, "walk", lambda *_: tuning.Walk(2, 3, 4, 1))
    check(partial(call, 4, None, length), x | old)


def test_tiles_wider_than_the_slots_change_nothing(monkeypatch):
    x = inputs(B=1, T=30, HQ=1, K=64, V=64, M=16, dtype=torch.float32, device=DEVICE)
    old, length = carried(1, 1, 64, 64, 16, 4, dtype=torch.float32, device=DEVICE)
    monkeypatch.setattr(tuning, "slot_tile", lambda slots, *_: 2 * slots)
    check(partial(call, 4, None, length), x | old)


def test_slots_taken_part_by_part_change_nothing(monkeypatch):
    x = inputs(B=1, T=30, HQ=1, K=64, V=64, M=32, dtype=torch.float32, device=DEVICE)
    monkeypatch.setattr(tuning, "_SLOT_TILE", 16)
    check(partial(call, 4, None, None), x)


def test_tiles_wider_than_the_slots_in_memory_change_nothing(monkeypatch):
    x = inputs(B=1, T=60, HQ=1, K=64, V=64, M=16, gates="hard", dtype=torch.float32, device=DEVICE)
    old, length = carried(1, 1, 64, 64, 16, 4, dtype=torch.float32, device=DEVICE)
    monkeypatch.setattr(tuning, "whole_tile", lambda *_: 32)
    monkeypatch.setattr(tuning, "tile", lambda *_: tuning.Tile(16, 32, 16, 4, 1))
    monkeypatch.setattr(tuning, "walk", lambda *_: tuning.Walk(2, 3, 4, 1))
    check(partial(call, 4, None, length), x | old)


def test_programs_that_look_at_several_heads_change_nothing(monkeypatch):
    x = inputs(B=1, T=40, HQ=3, H=3, K=64, V=64, M=16, dtype=torch.float32, device=DEVICE)
    x["f"][:, 20:, 1] -= 20
    monkeypatch.setattr(tuning, "strong_heads", lambda *_: 2)
    check(partial(call, 4, None, None), x)


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("inside", [512, 2])
def test_step_kernel_equals_the_whole(monkeypatch, inside, own_keys):
    monkeypatch.setattr(step, "_RING_INSIDE", inside)
    x = inputs(T=24, HQ=2, K=64, V=64, M=16, own_keys=own_keys, dtype=torch.float32, device=DEVICE)
    for window in (0, 5, 40):
        whole, _ = slot_window_attention(**x, window=window, impl="reference")
        _, state = slot_window_attention(**tokens(x, 0, 18), window=window, impl="reference")
        state = state.reserve(window)
        for t in range(18, 24):
            o = slot_window_attention_step(**token(x, t), state=state, impl="triton")
            assert relative_error(o, whole[:, t]) < 2e-6


def test_a_backward_pass_shows_itself_to_a_mode_that_watches():
    x = inputs(B=1, T=9, HQ=1, K=64, V=64, M=16, dtype=torch.float32, device=DEVICE)
    leaves = [value.requires_grad_() for value in x.values() if value is not None]
    o = slot_window_attention(**x, window=4, output_final_state=False, impl="triton").o
    wanted = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    got, seen = watched(lambda: torch.autograd.grad(o.sum(), leaves))
    assert "tokenmix_nha.slot_window_attention_backward.default" in seen
    assert all(map(torch.equal, got, wanted))


def test_ops_are_registered_for_compilation():
    from tokenmix_nha.ops.slot_window.autograd import slot_window_attention_op

    x = inputs(B=1, T=20, HQ=1, K=64, V=64, M=16, dtype=torch.float32, device=DEVICE)
    arguments = (*x.values(), None, None, None, None, None, None, 0, 4, 0.1)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(slot_window_attention_op, arguments, test_utils=tests)


# ---- errors ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, "window must be an integer of at least 0, got -1"),
        ({"window": 2.0}, "window must be an integer"),
        ({"window": True}, "window must be an integer"),
        (
            {"k": torch.zeros(2, 7, 1, 8)},
            r"k must have shape \[B, T, H, K\] with B=2, T=8, K=8, H=1, got \[2, 7, 1, 8\]",
        ),
        ({"q": torch.zeros(2, 8, 3, 8), "k": torch.zeros(2, 8, 2, 8)}, "H=2"),
        ({"f": torch.zeros(2, 8, 1)}, "f must have shape"),
        ({"f": None}, "f must be a tensor .*, got None"),
        ({"v": torch.zeros(2, 8, 1, 6, dtype=torch.float16)}, "must share one dtype"),
        ({"f": torch.zeros(2, 8, 1, 5, dtype=torch.int64)}, "f must be"),
        ({"q_slots": torch.zeros(2, 8, 2, 8)}, "q_slots without k_slots"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"scale": float("inf")}, "scale must be a finite number, got inf"),
        ({"scale": "half"}, "scale must be a finite number, got 'half'"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "a packed batch has B = 1"),
        ({"impl": "cuda"}, "impl must be None or one of"),
        ({"impl": "triton"}, "needs K in 64, 128, got K=8"),
        ({"initial_state": torch.zeros(3)}, "SlotWindowState, got Tensor"),
        ({"initial_state": SlotWindowState.zeros(3, 1, 5, 8, 6, 4)}, "state.slots_k must have shape"),
        ({"initial_state": SlotWindowState.zeros(2, 1, 5, 8, 6, 4, own_slot_keys=True)}, "made with k_slots"),
        ({"initial_state": SlotWindowState.zeros(2, 1, 5, 8, 6, 4, dtype=torch.bfloat16)}, "must share one dtype"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x = inputs(T=8, dtype=torch.float32) | {"window": 3} | change
    with pytest.raises(ValueError, match=message):
        slot_window_attention(**x)


def test_a_step_refuses_a_state_it_cannot_update():
    x = token(inputs(T=3, dtype=torch.float32), 0)
    state = SlotWindowState.zeros(2, 1, 5, 8, 6, 4)
    with pytest.raises(ValueError, match="must be contiguous"):
        slot_window_attention_step(**x, state=state._replace(k=state.k.repeat(1, 1, 1, 2)[..., ::2]))
    with pytest.raises(ValueError, match="at least the ring's 4 places, got 3"):
        state.reserve(3)
