"""Time attention to retained keys, to all keys and to a window only, and FlexAttention with the same mask.

Run as a program, it prints each row once measured: of our kernels alone or, with `--baselines`, also of libraries.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.kernels.tuning import override
from tokenmix_core.ops import attention, kept_attention
from tokenmix_core.ops.softmax_attention.backends import flash_attention
from tokenmix_core.ops.sparse_attention import tuning
from tokenmix_core.testing.benchmarking import first_call_seconds, measure, measure_forms, table


class Case(NamedTuple):
    """Sizes of a call, as in docs/notation.md.

    `kept` is the number of random units of keys that each head retains, or a rule that `_keep` applies. Without a
    window, a query's local keys are those of its own unit.
    """

    B: int
    T: int
    HQ: int = 32
    H: int = 8
    HM: int = 8
    K: int = 64
    V: int = 64
    unit: int = 1
    window: int | None = 768
    kept: int | str = 512


CHUNKS = {"HQ": 12, "H": 12, "HM": 6, "V": 128, "unit": 64, "window": None}
CASES = [
    Case(8, 4096),
    Case(8, 4096, kept=4096),
    Case(8, 4096, kept=0),
    Case(1, 32768),
    Case(1, 32768, kept=4096),
    Case(1, 131072),
    Case(1, 32768, kept=128, **CHUNKS),
    Case(2, 4096, kept=16, **CHUNKS),
]
CPU_CASES = [
    Case(1, 256, 4, 2, 2, 16, 16, window=32, kept=16),
    Case(1, 256, 4, 4, 2, 16, 32, unit=64, window=None, kept=2),
]
# tiles that have not been timed yet: queries, keys, warps, stages, registers per thread
TILES = [
    tuning.AttentionTile(64, 64, 4, 1, 168),
    tuning.AttentionTile(128, 64, 8, 1, 128),
    tuning.AttentionTile(128, 64, 4, 1, 255),
]
# other counts of retained keys, counts that differ between heads or queries, other heads
SWEEP = [
    *(Case(8, 4096, kept=kept) for kept in (64, 256, 1024, 2048)),
    *(Case(1, 32768, kept=kept) for kept in (128, 2048, 16384)),
    Case(1, 32768, kept="all of one head"),
    Case(1, 32768, kept="the first 64"),
    Case(1, 32768, kept="one in 512, from the end"),
    Case(1, 4096, HQ=8, H=8, kept=512),
    Case(2, 4096, HQ=16, H=16, HM=16, K=128, V=128, window=1024, kept=512),
    Case(1, 16384, HQ=16, H=4, HM=1, window=512, kept=1024),
    Case(1, 32768, kept=256, **CHUNKS),
    Case(1, 32768, kept=32, **{**CHUNKS, "unit": 256}),
]

_FIRST_CALL = """
import torch
from tokenmix_core.ops import kept_attention
q, k = (torch.randn(1, 4096, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (32, 8))
keep = torch.rand(1, 4096, 8, device="cuda") < 0.1
torch.cuda.synchronize()
"""
_CALL = """
o = kept_attention(q, k, k, keep, window=768).o
torch.autograd.grad(o, (q, k), torch.ones_like(o))
torch.cuda.synchronize()
"""


def rows(device: str) -> Iterator[dict]:
    """Measure only our kernels, and yield each case's rows at once: retained keys, sinks, all keys, the window."""
    yield from _sinks(device)
    for case in CASES if device != "cpu" else CPU_CASES:
        yield from _rows(case, device)


def baselines(device: str) -> Iterator[dict]:
    """Measure the same cases also with FlashAttention-4, cuDNN and FlexAttention (a minute to compile per case)."""
    for case in CASES if device != "cpu" else CPU_CASES[:1]:
        yield from _rows(case, device, baselines=True)


def sweep(device: str) -> Iterator[dict]:
    """Measure like `rows`, at the cases of `SWEEP`."""
    for case in SWEEP if device != "cpu" else CPU_CASES[:1]:
        yield from _rows(case, device)


def versions(device: str) -> Iterator[dict]:
    """Measure the Triton and the Gluon kernels on the installed Triton."""
    cases = [CASES[0], CASES[2], CASES[3], CASES[6]] if device != "cpu" else CPU_CASES[:1]
    for case in cases:
        q, k, v, keep = _inputs(case, device)

        def forward(impl: str, q=q, k=k, v=v, keep=keep, case=case) -> Tensor:
            return kept_attention(q, k, v, keep, unit=case.unit, window=case.window, impl=impl).o

        yield from measure_forms("kept_attention", _name(case), device, forward, (q, k, v))


def tiles(device: str) -> Iterator[dict]:
    """Measure the forward Gluon kernel with the tile of `tuning` and with other tiles, at three cases."""
    known = tuning.HOPPER_FORWARD
    first = known[64, 64]
    for case in (CASES[0], CASES[2], CASES[3]) if device != "cpu" else CPU_CASES[:1]:
        q, k, v, keep = _inputs(case, device)
        impl = "gluon" if device != "cpu" else "reference"
        for tile in (first, *TILES) if device != "cpu" else (first,):
            forwards = {f"{tile[:3]}, {tile.maxnreg}": lambda: kept_attention(
                q, k, v, keep, unit=case.unit, window=case.window, impl=impl  # noqa: B023
            ).o}  # fmt: skip
            with override(known, {(64, 64): tile}):
                yield from measure("kept_attention, tiles", _name(case), device, forwards, (q, k, v))


def _inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and `keep`."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.randn(case.B, case.T, heads, size, device=device, dtype=dtype).requires_grad_()
        for heads, size in ((case.HQ, case.K), (case.H, case.K), (case.H, case.V))
    )
    keep = _keep(case, device)
    # a `keep` of chunks gets gradients itself, one of tokens gets none
    return q, k, v, keep.float().requires_grad_() if case.unit > 1 else keep


def _rows(case: Case, device: str, baselines: bool = False) -> list[dict]:
    q, k, v, keep = _inputs(case, device)
    own = None if device == "cpu" else "triton"
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: kept_attention(q, k, v, keep, unit=case.unit, window=case.window).o,
        "all keys, tokenmix": lambda: attention(q, k, v, impl=own).o,
    }
    if case.window is not None:
        forwards["the window alone, tokenmix"] = lambda: attention(q, k, v, window=case.window, impl=own).o
    if baselines and device != "cpu":
        forwards |= _baselines(case, q, k, v, keep.detach() > 0.5, forwards["tokenmix"])
    first = None
    if device != "cpu" and baselines and case == CASES[0]:
        first = {"tokenmix": functools.partial(first_call_seconds, _FIRST_CALL, _CALL)}
    return measure("kept_attention", _name(case), device, forwards, (q, k, v), first_calls=first)


def _baselines(case: Case, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, ours: Callable) -> dict[str, Callable]:
    forwards = {"all keys, cuDNN": lambda: attention(q, k, v, impl="sdpa").o}
    if (flash := _flash()) is not None:
        forwards["all keys, FlashAttention-4"] = lambda: flash(q, k, v, causal=True)
        if case.window is not None:
            sides = (case.window - 1, 0)
            forwards["the window alone, FlashAttention-4"] = lambda: flash(q, k, v, causal=True, window_size=sides)
    if case.T <= 32768:
        forwards["FlexAttention, compiled"] = _flex(case, q, k, v, keep, ours)
    return forwards


def _sinks(device: str) -> list[dict]:
    """Measure a window with four sinks and without sinks."""
    (T, HQ, H, K), window, dtype = (65536, 32, 4, 64), 256, torch.bfloat16
    if device == "cpu":
        (T, HQ, H, K), window, dtype = (512, 4, 2, 16), 64, torch.float32
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, K, device=device, dtype=dtype).requires_grad_() for heads in (HQ, H, H))
    forwards = {
        "tokenmix, 4 sinks": lambda: attention(q, k, v, window=window, sinks=4).o,
        "tokenmix, no sinks": lambda: attention(q, k, v, window=window).o,
    }
    return measure(f"attention, window {window}", f"B1 T{T} H{HQ}/{H} K{K}", device, forwards, (q, k, v))


def _keep(case: Case, device: str) -> Tensor:
    U = case.T // case.unit
    if isinstance(case.kept, int):
        places = torch.rand(case.B, U, case.HM, device=device).argsort(1).argsort(1)
        return places < case.kept
    keep = torch.zeros(case.B, U, case.HM, dtype=torch.bool, device=device)
    if case.kept == "all of one head":
        keep[..., -1] = True
    elif case.kept == "the first 64":
        keep[:, :64] = True
    else:
        keep[:, U // 2 :: 512] = True
    return keep


def _name(case: Case) -> str:
    heads = str(case.HQ) if case.HQ == case.H else f"{case.HQ}/{case.H}"
    sizes = f"K{case.K}" if case.K == case.V else f"K{case.K} V{case.V}"
    local = "own unit" if case.window is None else f"window {case.window}"
    kept = f"{case.kept} of {case.T // case.unit} kept" if isinstance(case.kept, int) else f"{case.kept} kept"
    return f"B{case.B} T{case.T} H{heads} {sizes}, {local}, units of {case.unit}, {kept}"


def _flash() -> Callable | None:
    """Return FlashAttention-4's function, changed to return only the output; None if it is not installed."""
    if flash_attention() != 4:
        return None
    function = importlib.import_module("flash_attn.cute").flash_attn_func

    def run(*inputs, **options):
        out = function(*inputs, **options)
        return out[0] if isinstance(out, tuple) else out

    return run


def _flex(case: Case, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, ours: Callable) -> Callable[[], Tensor]:
    """Return FlexAttention with the same mask; its first call makes the block mask and checks its output."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    group, unit, window = case.HQ // case.HM, case.unit, case.window

    def seen(b, h, i, j):
        left = i // unit * unit if window is None else i - window + 1
        return (j <= i) & ((j >= left) | keep[b, j // unit, h // group])

    mask = None
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def run():
        nonlocal mask
        first = mask is None
        if mask is None:
            make = torch.compile(create_block_mask)
            mask = make(seen, case.B, case.HQ, case.T, case.T, device=q.device.type)
        x = (x.transpose(1, 2) for x in (q, k, v))
        o = compiled(*x, block_mask=mask, enable_gqa=case.HQ != case.H).transpose(1, 2)
        if first:
            with torch.no_grad():
                error = ((o - ours()).float().norm() / o.float().norm()).item()
            assert error < 0.02, f"its output differs from ours by {error:.2g}"
        return o

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--baselines", action="store_true", help="beside FlashAttention-4, cuDNN and FlexAttention")
    wanted.add_argument("--sweep", action="store_true", help="other lists and heads, ours alone")
    wanted.add_argument("--versions", action="store_true", help="kernels in Gluon beside portable ones")
    wanted.add_argument("--tiles", action="store_true", help="other tiles of the forward kernel in Gluon")
    asked = next((name for name, yes in vars(parser.parse_args()).items() if yes), "rows")
    for row in {f.__name__: f for f in (rows, baselines, sweep, versions, tiles)}[asked](
        "cuda" if torch.cuda.is_available() else "cpu"
    ):
        print(table([row]).splitlines()[1], flush=True)
