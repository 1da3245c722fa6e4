"""Slot-window attention on a GPU: values and gradients of all tiles, long sequences, graphs, no synchronisation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from machine_code import compiled_kernels, disassembler, unwritten_reads

from tokenmix_core.testing.agreement import RoundedProducts, values_and_gradients
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_nha.ops import SlotWindowState, slot_window_attention, slot_window_attention_step

pytestmark = pytest.mark.gpu

# name: tokens, query heads per key head, window, separate slot keys, gates
CASES = {
    "slots alone": (300, 1, 0, False, "mixed"),
    "window 32": (300, 1, 32, False, "weak"),
    "own keys": (333, 1, 70, True, "weak"),
    "own keys, grouped heads": (333, 2, 70, True, "mixed"),
    "grouped heads": (300, 3, 32, False, "weak"),
    "hard gates": (257, 2, 20, True, "hard"),
    "wide window": (257, 1, 200, False, "mixed"),
}


def inputs(B, T, HQ, H, K, V, M, own_keys, gates, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device="cuda")
    f = torch.nn.functional.logsigmoid(2 * randn(B, T, H, M))
    if gates != "mixed":
        f = f / 16
    if gates == "hard":
        f = torch.where(randn(f.shape) > 1, -1e4, torch.where(randn(f.shape) > 1, 0.0, f))
    x = {"q": randn(B, T, HQ, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V)}
    if own_keys:
        x |= {"q_slots": randn(B, T, HQ, K), "k_slots": randn(B, T, H, K)}
    return {name: value.to(dtype) for name, value in x.items()} | {"f": f}


def state_inputs(N, W, H, K, V, M, own_keys, dtype):
    randn = partial(torch.randn, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    x = {
        "slots_k": randn(N, H, M, K), "slots_v": randn(N, H, M, V), "ring_k": randn(N, W, H, K).to(dtype),
        "ring_v": randn(N, W, H, V).to(dtype), "ring_f": -randn(N, W, H, M).abs(),
    }  # fmt: skip
    length = torch.tensor([(W // 2, W, 3 * W + 1, 0)[n % 4] for n in range(N)], dtype=torch.int32, device="cuda")
    length = length[:, None].repeat(1, H)
    return x | ({"ring_k_slots": randn(N, W, H, K).to(dtype)} if own_keys else {}), length


class Results(dict):
    def _asdict(self):
        return dict(self)


def run(window, impl, cu_seqlens=None, length=None, **x):
    """Return all results by name, from tensors by name, including those of a carried state."""
    ring_k_slots = x.pop("ring_k_slots", None)
    old = [x.pop(name) for name in ("slots_k", "slots_v", "ring_k", "ring_v", "ring_f") if name in x]
    state = SlotWindowState(*old, ring_k_slots, length) if old else None
    o, state = slot_window_attention(**x, window=window, initial_state=state, cu_seqlens=cu_seqlens, impl=impl)
    if state.slots_k.requires_grad:
        return Results(o=o, slots_k=state.slots_k, slots_v=state.slots_v, ring_v=state.v)
    # no token has entered the slots, because the window is as wide as the sequence
    return Results(o=o, ring_v=state.v, ring_f=state.f)


def check(x, window, dtype, **options):
    """Check that errors are at most twice those of the eager form with GEMM operands rounded to the kernels' dtype."""
    got, upstream = values_and_gradients(partial(run, window, None, **options), x)
    eager = partial(run, window, "reference", **options)
    exact, _ = values_and_gradients(eager, x, upstream, dtype=torch.float64)
    if dtype == torch.float32:
        rounded, _ = values_and_gradients(eager, x, upstream)
        # a sum of 16 log2 gates, each at least −28, is rounded once
        floor = 2**-24 * 28 * 16 * 0.7
    else:
        with RoundedProducts(dtype):
            rounded, _ = values_and_gradients(eager, x, upstream)
        floor = torch.finfo(dtype).eps / 2
    for name in exact:
        assert_within(name, got[name], exact[name], rounded[name], floor=floor)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("M", [16, 32, 64, 128])
def test_every_tile_agrees_with_float64(M, K, V, case):
    T, group, window, own_keys, gates = CASES[case]
    check(inputs(2, T, 2 * group, 2, K, V, M, own_keys, gates, torch.bfloat16), window, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("M", [16, 32, 64, 128])
def test_every_dtype_agrees_with_float64(M, dtype):
    check(inputs(1, 200, 2, 1, 128, 128, M, True, "mixed", dtype), 40, dtype)


@pytest.mark.parametrize("M", [16, 32, 64, 128])
def test_carried_and_packed_agree_with_float64(M):
    old, length = state_inputs(5, 50, 1, 128, 128, M, True, torch.bfloat16)
    boundaries = torch.tensor([0, 0, 100, 129, 130, 257], dtype=torch.int32, device="cuda")
    for window, group, gates in ((0, 2, "mixed"), (40, 2, "mixed"), (40, 1, "weak"), (100, 2, "mixed")):
        x = inputs(1, 257, group, 1, 128, 128, M, True, gates, torch.bfloat16)
        check(x | old, window, torch.bfloat16, cu_seqlens=boundaries, length=length)


@pytest.mark.parametrize(("T", "window"), [(1, 20), (63, 20), (64, 20), (65, 20), (65, 12), (2100, 20)])
def test_lengths_and_segments_agree_with_float64(T, window):
    old, length = state_inputs(1, 20, 1, 64, 64, 64, False, torch.bfloat16)
    check(inputs(1, T, 1, 1, 64, 64, 64, False, "weak", torch.bfloat16) | old, window, torch.bfloat16, length=length)


def test_a_full_window_agrees_with_float64():
    check(inputs(2, 300, 4, 2, 128, 128, 64, False, "weak", torch.bfloat16), 300, torch.bfloat16)


# about 100 kernels if the process ran other tests: compilation, then 1 to 2 s each to disassemble and search
@pytest.mark.timeout(600)
@pytest.mark.skipif(not disassembler().exists(), reason="Triton came without its disassembler")
def test_no_kernel_reads_an_unwritten_register():
    """Search kernels of these calls and of all earlier ones: ptxas 12.8 can omit writes, yet results may be right."""
    for M in (32, 64, 128):
        for own_keys, group, window in ((False, 1, 32), (False, 2, 32), (True, 1, 100), (True, 2, 0)):
            x = inputs(1, 300, group, 1, 128, 128, M, own_keys, "mixed", torch.bfloat16)
            values_and_gradients(partial(run, window, None), x)
    names, kernels = zip(*compiled_kernels("tokenmix_nha.ops.slot_window"), strict=True)
    assert len(kernels) > 10
    with ThreadPoolExecutor() as pool:
        assert not {name: found for name, found in zip(names, pool.map(unwritten_reads, kernels), strict=True) if found}


@pytest.mark.parametrize(("M", "group"), [(32, 1), (64, 1), (64, 2), (32, 2)])
def test_the_same_call_gives_the_same_bits(M, group):
    x = inputs(2, 500, 4 * group, 4, 128, 128, M, False, "weak", torch.bfloat16)
    first, upstream = values_and_gradients(partial(run, 32, None), x)
    for _ in range(5):
        again, _ = values_and_gradients(partial(run, 32, None), x, upstream)
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_the_second_half_of_131072_tokens_continues_the_first():
    x = inputs(1, 131072, 2, 1, 128, 128, 32, False, "weak", torch.bfloat16)
    whole, _ = slot_window_attention(**x, window=32)
    half = {name: value[:, 65536:] for name, value in x.items()}
    _, state = slot_window_attention(**{name: value[:, :65536] for name, value in x.items()}, window=32)
    o, _ = slot_window_attention(**half, window=32, initial_state=state)
    assert relative_error(o, whole[:, 65536:]) < 4e-3


def test_tensors_past_two_to_the_31_elements():
    """The last head of the last row, whose offsets exceed 32 bits, equals the same head alone."""
    B, T, H = 5, 131072, 32
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(B, T, H, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    f = -torch.rand(B, T, H, 16, generator=generator, device="cuda").mul_(0.1)
    assert q.numel() > 2**31
    o, _ = slot_window_attention(q, k, v, f, window=32, output_final_state=False)
    alone, _ = slot_window_attention(*(x[-1:, :, -1:] for x in (q, k, v, f)), window=32, output_final_state=False)
    assert relative_error(o[-1:, :, -1:], alone) < 4e-3


def test_training_does_not_synchronise():
    x = inputs(1, 500, 2, 2, 64, 64, 64, False, "weak", torch.bfloat16)
    boundaries = torch.tensor([0, 200, 500], dtype=torch.int32, device="cuda")
    train = lambda: values_and_gradients(partial(run, 32, None, cu_seqlens=boundaries), x)  # noqa: E731
    train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("M", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [0, 32, 600])
def test_steps_in_a_cuda_graph_equal_one_call(M, window, own_keys):
    x = inputs(3, 64, 4, 2, 128, 128, M, own_keys, "mixed", torch.bfloat16)
    whole, _ = slot_window_attention(**{n: v.double() for n, v in x.items()}, window=window, impl="reference")
    state = SlotWindowState.zeros(
        3, 2, M, 128, 128, window, own_slot_keys=own_keys, dtype=torch.bfloat16, device="cuda"
    )
    token = {name: value[:, 0].clone() for name, value in x.items()}
    slot_window_attention_step(**token, state=state)
    for part in state:
        if part is not None:
            part.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = slot_window_attention_step(**token, state=state)
    outputs = []
    for t in range(64):
        for name, value in x.items():
            token[name].copy_(value[:, t])
        graph.replay()
        outputs.append(o.clone())
    assert relative_error(torch.stack(outputs, 1), whole) < 4e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_steps_run_on_the_device_of_their_tensors():
    x = inputs(3, 8, 4, 2, 128, 128, 32, False, "mixed", torch.bfloat16)
    outputs = {}
    for device in ("cuda:0", "cuda:1"):
        state = SlotWindowState.zeros(3, 2, 32, 128, 128, 4, dtype=torch.bfloat16, device=device)
        tokens = [{name: value[:, t].to(device) for name, value in x.items()} for t in range(8)]
        # delay the current device, cuda:0: a step that wrongly ran there would finish after the second device's work
        torch.cuda._sleep(500_000_000)
        o = [slot_window_attention_step(**token, state=state) for token in tokens]
        outputs[device] = torch.stack(o).cpu()
    assert torch.equal(*outputs.values())


def test_training_can_be_captured_in_a_cuda_graph():
    x = inputs(1, 200, 2, 2, 64, 64, 64, False, "weak", torch.bfloat16)
    leaves = [value.requires_grad_() for value in x.values()]
    upstream = torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16)
    train = lambda: torch.autograd.grad(slot_window_attention(**x, window=32)[0], leaves, upstream)  # noqa: E731
    eager = train()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    graph.replay()
    for a, b in zip(captured, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
