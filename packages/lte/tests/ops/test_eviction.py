"""One step of eviction: the kernel agrees with the eager form for every state."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tokenmix_core.ops.explanation import explain
from tokenmix_core.testing.operations import Call, KernelCase, OpContract, Results
from tokenmix_lte.ops import evict_step

N, H, K, W, CAP, REACH = 3, 2, 5, 8, 6, 7


def tokens(rng):
    return [torch.randn(N, H, K, generator=rng) for _ in range(3)]


def any_state(seed: int, full: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return random memory and the number of tokens before the step in each row; many scores are equal."""
    rng = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 3 * W, (N,), generator=rng) if not full else torch.full((N,), 5 * W + seed)
    most = (before - W).clamp(0, CAP).view(N, 1)
    retained = most if full else (torch.rand(N, H, generator=rng) * (most + 1)).long().clamp(max=CAP)
    order = torch.rand(N, H, 4 * W, generator=rng).argsort(-1)[..., :CAP]
    state = {
        "keys": torch.randn(N, H, W + CAP, K, generator=rng),
        "values": torch.randn(N, H, W + CAP, K, generator=rng),
        "lengths": (before.clamp(max=W).view(N, 1) + retained).expand(N, H).int().contiguous(),
        "scores": torch.randint(-1, 3, (N, H, W + CAP), generator=rng).float(),
        "ages": order.int(),
        "raws": torch.randn(N, REACH, H, K, generator=rng),
    }
    state["scores"][:, :, W] = torch.inf
    return state, before


def after_a_step(k, v, raw, before, *, window, sinks, uniform, impl=None, **state):
    """Return the memory after a step."""
    state = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in state.items()}
    evict_step(k, v, raw, **state, before=before, window=window, sinks=sinks, uniform=uniform, impl=impl)
    return Results(state)


def one_head(scores, ages, lengths, before, window, sinks, uniform):
    """Return the index among retained tokens that the leaving token takes, its score, and the length after the step.

    The index is None if the token is evicted, and also the score if no token leaves the window.
    """
    age, retained = before - window, lengths - min(before, window)
    if age < 0:
        return None, None, lengths + 1
    score = float(scores[before % window])
    if uniform:
        # 1 + the exponent of the largest power of two that divides the position
        score = float("inf") if age == 0 else 1 + (age & -age).bit_length() - 1
    score = float("inf") if age < sinks else score
    if score <= 0:
        return None, None, lengths
    if retained < len(ages):
        return retained, score, lengths + 1
    # replace the retained token with the lowest score, among equal ones the youngest
    worst = min(range(retained), key=lambda i: (float(scores[window + i]), -int(ages[i])))
    return (worst, score, lengths) if score > float(scores[window + worst]) else (None, None, lengths)


class TestEviction(OpContract):
    covers = (evict_step,)
    absent: ClassVar = {
        "lengths": "a step has one token",
        "parts": "a step has one token; the test of retained slots follows a sequence",
        "packed": "each row of memory holds one sequence",
        "step": "the operation is a step itself",
        "malformed_steps": "the operation has no other step",
        "replayed": "the launch is part of a decoding step, which is captured as one CUDA graph",
    }
    forms: ClassVar = {"step": after_a_step}
    differentiable = False
    cases: ClassVar = {
        f"{'full' if full else 'filling'}, {sinks} sinks, {'by position' if uniform else 'by score'}, {seed}": dict(
            seed=seed, full=full, sinks=sinks, uniform=uniform
        )
        for full in (False, True)
        for sinks in (0, 3)
        for uniform in (False, True)
        for seed in range(4)
    }
    dtypes = ("float32",)
    kernels: ClassVar = {name: KernelCase(sizes) for name, sizes in cases.items()}
    neighbours: ClassVar = dict(sinks=3)
    mutated = ("keys", "values", "lengths", "scores", "ages", "raws")
    traced: ClassVar = dict(sinks=3)
    malformed: ClassVar = {
        "scores of float64": (
            {"scores": torch.zeros(N, H, W + CAP).double(), "impl": "triton"},
            "scores must be float32",
        ),
        "scores that are not contiguous": ({"scores": torch.zeros(N, W + CAP, H).mT}, "scores must be contiguous"),
        "lengths of int64": ({"lengths": torch.zeros(N, H, dtype=torch.int64)}, "lengths must be int32"),
        "ages of another cap": ({"ages": torch.zeros(N, H, CAP - 1, dtype=torch.int32)}, r"S = window \+ cap slots"),
        "more sinks than cap": ({"sinks": CAP + 1}, "sinks from 0 to cap"),
        "a list": ({"k": [1.0]}, "k must be a tensor of shape .*, got list"),
    }  # fmt: skip

    @staticmethod
    def results(output):
        """Replace the +∞ of sinks by a finite score, so that differences are finite."""
        return output | {"scores": output["scores"].nan_to_num(nan=torch.nan, posinf=1e6)}

    def make(
        self, dtype=torch.float64, device="cpu", seed=0, full=True, sinks=0, uniform=False, T=1
    ) -> Call:  # fmt: skip
        state, before = any_state(seed, full)
        named = dict(zip(("k", "v", "raw"), tokens(torch.Generator().manual_seed(seed)), strict=True)) | state
        options = {"before": before.to(device), "window": W, "sinks": sinks, "uniform": uniform}
        # the memory is float32 for every `dtype`
        return Call({name: x.to(device) for name, x in named.items()}, options)

    def definition(self, k, v, raw, before, *, window, sinks, uniform, **state):
        state = {name: x.clone() for name, x in state.items()}
        for n, position in enumerate(before.tolist()):
            state["raws"][n, position % REACH] = raw[n]
            for h in range(H):
                scores, ages, slot = state["scores"][n, h], state["ages"][n, h], position % window
                at, score, length = one_head(
                    scores, ages, int(state["lengths"][n, h]), position, window, sinks, uniform
                )  # fmt: skip
                state["lengths"][n, h] = length
                if at is not None:
                    scores[window + at], ages[at] = score, position - window
                for name, token in (("keys", k), ("values", v)):
                    held = state[name][n, h]
                    if at is not None:
                        held[window + at] = held[slot]
                    held[slot] = token[n, h]
        return Results(state)

    def operators(self, device):
        from tokenmix_lte.ops.eviction.api import _evict_step_op

        x, _ = self.make(device=device)
        before = torch.full((N,), 9, device=device)
        yield _evict_step_op, (*x.values(), before, W, 0, False), "test_schema", "test_faketensor"


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_retained_slots_hold_the_best_tokens_beyond_the_window_and_the_older_of_equal_ones(impl, device):
    rng, rows = torch.Generator().manual_seed(0), 4 * W
    logits = torch.randint(-1, 4, (N, H, rows), generator=rng).float()
    state, _ = any_state(0, full=False)
    state = {name: torch.zeros_like(x).to(device) for name, x in state.items()}
    for p in range(rows):
        # write the previous token's score: it is known before the token leaves the window
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
