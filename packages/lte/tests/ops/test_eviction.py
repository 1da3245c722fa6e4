"""One step of eviction: the kernel leaves every state as the eager form does, in the interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.ops.explanation import explain
from tokenmix_lte.ops import evict_step

N, H, K, W, CAP, REACH = 3, 2, 5, 8, 6, 7
NAMES = ("keys", "values", "lengths", "scores", "ages", "raws")


def tokens(rng):
    return [torch.randn(N, H, K, generator=rng) for _ in range(3)]


def any_state(seed: int, full: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Memory with scores of few values, so that many are equal, for rows of different lengths."""
    rng = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 3 * W, (N,), generator=rng) if not full else torch.full((N,), 5 * W + seed)
    most = (before - W).clamp(0, CAP).view(N, 1)
    far = most if full else (torch.rand(N, H, generator=rng) * (most + 1)).long().clamp(max=CAP)
    order = torch.rand(N, H, 4 * W, generator=rng).argsort(-1)[..., :CAP]
    state = {
        "keys": torch.randn(N, H, W + CAP, K, generator=rng),
        "values": torch.randn(N, H, W + CAP, K, generator=rng),
        "lengths": (before.clamp(max=W).view(N, 1) + far).expand(N, H).int().contiguous(),
        "scores": torch.randint(-1, 3, (N, H, W + CAP), generator=rng).float(),
        "ages": order.int(),
        "raws": torch.randn(N, REACH, H, K, generator=rng),
    }
    state["scores"][:, :, W] = torch.inf
    return state, before


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("sinks", [0, 3])
def test_the_kernel_leaves_any_state_as_the_eager_form_does(full, sinks, uniform, device):
    evicted = 0
    for seed in range(12):
        state, before = any_state(seed, full)
        new, found = tokens(torch.Generator().manual_seed(seed)), []
        for impl in ("reference", "triton"):
            held = {name: x.to(device, copy=True) for name, x in state.items()}
            evict_step(
                *(x.to(device) for x in new), *held.values(), before.to(device), window=W, sinks=sinks,
                uniform=uniform, impl=impl,
            )  # fmt: skip
            found.append(held)
        for name in NAMES:
            assert torch.equal(found[0][name], found[1][name]), name
        evicted += int((found[0]["ages"].cpu() != state["ages"]).sum())
    assert evicted > 0


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_far_places_hold_the_best_of_all_that_left_with_the_older_of_equal_ones(impl, device):
    rng, rows = torch.Generator().manual_seed(0), 4 * W
    logits = torch.randint(-1, 4, (N, H, rows), generator=rng).float()
    state, _ = any_state(0, full=False)
    state = {name: torch.zeros_like(x).to(device) for name, x in state.items()}
    for p in range(rows):
        # a score is known before its token leaves
        state["scores"][:, :, (p - 1) % W] = logits[:, :, p - 1].to(device)
        new = [x.to(device) for x in tokens(rng)]
        evict_step(*new, *state.values(), torch.full((N,), p, device=device), window=W, sinks=2, impl=impl)
        for n in range(N):
            for h in range(H):
                left = [(float("inf") if j < 2 else float(logits[n, h, j]), j) for j in range(max(0, p - W + 1))]
                best = sorted((x for x in left if x[0] > 0), key=lambda x: (-x[0], x[1]))[:CAP]
                length = int(state["lengths"][n, h]) - min(p + 1, W)
                assert sorted(state["ages"][n, h, :length].tolist()) == sorted(j for _, j in best)


def test_explain_names_the_kernel():
    assert "evict_step" in str(explain(evict_step, device="cpu"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("scores", torch.zeros(N, H, W + CAP).double(), "scores must be float32"),
        ("scores", torch.zeros(N, W + CAP, H).mT, "scores must be contiguous"),
        ("lengths", torch.zeros(N, H, dtype=torch.int64), "lengths must be int32"),
        ("ages", torch.zeros(N, H, CAP - 1, dtype=torch.int32), "far places"),
    ],
)
def test_what_does_not_fit_is_refused(name, value, words):
    state, before = any_state(0, full=True)
    with pytest.raises(ValueError, match=words):
        evict_step(*tokens(torch.Generator()), *(state | {name: value}).values(), before, window=W, impl="triton")
