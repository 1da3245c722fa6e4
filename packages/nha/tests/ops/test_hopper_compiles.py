"""The installed Triton compiles slot-window attention's Gluon kernels for Hopper, without a GPU."""

from __future__ import annotations

from functools import partial

import torch

from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu

PACKED = dict(B=1, T=16384, H=4, boundaries=[0, 3000, 3000, 9000, 16384])


def attention(B=8, T=4096, H=16, group=1, K=128, V=128, M=32, w=32, own_keys=False, carried=False, boundaries=None):
    """Run forward and backward on tensors without data."""
    from tokenmix_nha.ops import SlotWindowState, slot_window_attention

    empty, long = partial(torch.empty, dtype=torch.bfloat16), partial(torch.empty, dtype=torch.float32)
    x = {"q": empty(B, T, H * group, K), "k": empty(B, T, H, K), "v": empty(B, T, H, V), "f": long(B, T, H, M)}
    if own_keys:
        x |= {"q_slots": empty(B, T, H * group, K), "k_slots": empty(B, T, H, K)}
    x = {name: value.requires_grad_() for name, value in x.items()}
    cu_seqlens, state = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32), None
    if carried:
        N = B if boundaries is None else len(boundaries) - 1
        ring = empty(N, w, H, K), empty(N, w, H, V), long(N, w, H, M), empty(N, w, H, K) if own_keys else None
        state = SlotWindowState(long(N, H, M, K), long(N, H, M, V), *ring, torch.zeros(N, H, dtype=torch.int32))
    o = slot_window_attention(**x, window=w, initial_state=state, cu_seqlens=cu_seqlens, impl="gluon").o
    torch.autograd.grad(o, list(x.values()), torch.empty_like(o))


# the first two calls launch every kernel: without `every`, only a kernel's first launch is compiled
CALLS = {"32 slots": attention, "64 slots": partial(attention, M=64)}
for K in (64, 128):
    for V in (64, 128):
        for M in (32, 64):
            sizes, name = dict(K=K, V=V, M=M), f"{K} {V}, {M} slots"
            CALLS[name] = partial(attention, **sizes)
            CALLS[f"{name}, no window"] = partial(attention, w=0, **sizes)
            CALLS[f"{name}, packed"] = partial(attention, **PACKED, carried=True, **sizes)
            CALLS[f"{name}, own keys"] = partial(attention, B=2, H=8, group=2, own_keys=True, w=128, **sizes)


@without_gpu
def test_every_kernel_compiles_and_fits_on_an_sm():
    kernels = compiled_by(__file__)
    assert len({x["kernel"] for x in kernels}) == 6
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(CALLS, "tokenmix_core.ops", "tokenmix_nha.ops")
