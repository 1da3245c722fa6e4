"""Time NSA's branches, FLA's and SFNSA's NSA, causal attention and a window; the selected branch and FlexAttention.

With random inputs neighbouring queries select mostly different blocks, the worst case for implementations that share
reads among queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops import attention
from tokenmix_core.testing.benchmarking import first_call_seconds, installed, measure, measure_step
from tokenmix_lte.ops import block_attention, gated_sum, select_blocks
from tokenmix_lte.ops.branches.api import gated_sum_reference
from tokenmix_lte.ops.pooled_blocks import compressed_attention, pool_blocks


class Case(NamedTuple):
    """Sizes of a call, by default of the paper's layer: each query selects `blocks` blocks of `block` keys."""

    B: int
    T: int
    HQ: int = 32
    H: int = 2
    K: int = 64
    block: int = 64
    blocks: int = 16
    window: int = 512


# the shapes of the paper's layer, then those of SFNSA's own tables
CASES = [Case(8, 4096), Case(1, 32768), Case(1, 4096, 64, 4, 128), Case(1, 32768, 64, 4, 128)]
CPU_CASES = [Case(1, 128, 4, 2, 16, 16, 4, 32)]
# longer sequences, other groups, wider heads
SWEEP = [
    Case(1, 131072),
    Case(4, 8192),
    Case(8, 4096, HQ=16, H=16),
    Case(8, 4096, HQ=32, H=8),
    Case(8, 4096, HQ=16, H=1),
    Case(4, 4096, HQ=32, H=2, K=128),
]

_FIRST_CALL = """
import torch
from tokenmix_lte.nsa import Nsa
from tokenmix_core.nn.rotary import RotaryEmbedding
layer = Nsa(1024).cuda().bfloat16()
x = torch.randn(1, 4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
rotary = RotaryEmbedding(64, {"rope_theta": 1e4}).cuda()(torch.arange(4096, device="cuda").unsqueeze(0))
torch.cuda.synchronize()
"""
_CALL = """
layer(x, rotary=rotary)[0].sum().backward()
torch.cuda.synchronize()
"""


def rows(device: str) -> Iterator[dict]:
    """Measure all branches with their gates, and each step alone, at the paper's shapes."""
    for case in CASES if device != "cpu" else CPU_CASES:
        yield from _rows(case, device)


def sweep(device: str) -> Iterator[dict]:
    """Measure the shapes of `SWEEP`."""
    for case in SWEEP if device != "cpu" else CPU_CASES:
        yield from _rows(case, device)


def _rows(case: Case, device: str) -> Iterator[dict]:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.randn(case.B, case.T, heads, case.K, device=device, dtype=dtype).requires_grad_()
        for heads in (case.HQ, case.H, case.H)
    )
    gates = torch.rand(case.B, case.T, case.HQ, 3, device=device, dtype=dtype).requires_grad_()
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: _branches(case, q, k, v, gates),
        # attention does not use the gates, so add 0 · gates to its output
        "causal attention, tokenmix": _through(gates, lambda: attention(q, k, v).o),
        "the window alone, tokenmix": _through(gates, lambda: attention(q, k, v, window=case.window).o),
    }
    if device != "cpu":
        forwards |= _baselines(case, q, k, v, gates)
    first = None
    if device != "cpu" and case == CASES[0]:
        first = {"tokenmix": lambda: first_call_seconds(_FIRST_CALL, _CALL)}
    heads = f"{case.HQ}/{case.H}"
    shape = f"B{case.B} T{case.T} H{heads} K{case.K}, {case.blocks} blocks of {case.block}, window {case.window}"
    leaves = (q, k, v, gates)
    yield from measure("nsa", shape, device, forwards, leaves, first_calls=first, repeats=_repeats(device))
    yield from _steps(case, shape, device, q, k, v)
    yield from _sums(shape, device, gates, [torch.randn_like(q).requires_grad_() for _ in range(3)])


def _steps(case: Case, shape: str, device: str, q: Tensor, k: Tensor, v: Tensor) -> Iterator[dict]:
    """Measure each step of the branches alone."""
    with torch.no_grad():
        pooled = pool_blocks(k, case.block), pool_blocks(v, case.block)
        lse = compressed_attention(q, *pooled, case.block).lse
        blocks = select_blocks(q, pooled[0], lse, case.blocks, block_size=case.block)
    size, repeats = case.block, _repeats(device)

    def compressed() -> Tensor:
        return compressed_attention(q, pool_blocks(k, size), pool_blocks(v, size), size).o

    selected = {"tokenmix": lambda: block_attention(q, k, v, blocks, block_size=size).o}
    if device != "cpu" and case.T <= 32768:
        selected["FlexAttention, compiled"] = _flex(case, q, k, v, blocks)
    yield from measure("nsa, compressed branch", shape, device, {"tokenmix": compressed}, (q, k, v), repeats=repeats)
    yield from measure("nsa, selected branch", shape, device, selected, (q, k, v), repeats=repeats)

    def select() -> Tensor:
        return select_blocks(q, pooled[0], lse, case.blocks, block_size=size)

    # the selection has no gradient
    yield from measure_step("nsa, choice of blocks", shape, device, {"tokenmix": select})


def _sums(shape: str, device: str, gates: Tensor, branches: list[Tensor]) -> Iterator[dict]:
    """Measure the gated sum of the branches, by our kernel and by torch's operations, eager and compiled."""
    forwards = {
        "tokenmix": lambda: gated_sum(*branches, gates),
        "torch, eager": lambda: gated_sum_reference(*branches, gates),
    }
    if device != "cpu":
        compiled = torch.compile(gated_sum_reference)
        forwards["torch, compiled"] = lambda: compiled(*branches, gates)
    leaves = (*branches, gates)
    yield from measure("nsa, sum of branches", shape, device, forwards, leaves, repeats=_repeats(device))


def _branches(case: Case, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Compute the layer between its projections."""
    size = case.block
    pooled = pool_blocks(k, size), pool_blocks(v, size)
    compressed, lse = compressed_attention(q, *pooled, size)
    blocks = select_blocks(q, pooled[0], lse, case.blocks, block_size=size)
    selected = block_attention(q, k, v, blocks, block_size=size).o
    window = attention(q, k, v, window=case.window).o
    return gated_sum(compressed, selected, window, gates)


def _through(gates: Tensor, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Add 0 · gates to an output, so that the gates get a gradient of 0."""
    return lambda: run() + 0 * gates[0, 0, 0, 0]


def _baselines(case: Case, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return, if installed, FLA's NSA, and SFNSA's, which applies a sigmoid to the gates; block sizes equal ours."""
    found: dict[str, Callable[[], Tensor]] = {}
    if fla := installed("fla.ops.nsa:parallel_nsa"):
        options = {"block_counts": case.blocks, "block_size": case.block, "window_size": case.window}

        def run_fla() -> Tensor:
            names = ("g_cmp", "g_slc", "g_swa")
            return fla(q, k, v, **dict(zip(names, (x.contiguous() for x in gates.unbind(-1)), strict=True)), **options)

        found["FLA"] = run_fla
    if (config := installed("flash_nsa:NSAConfig")) and (core := installed("flash_nsa:HFNSACore")):
        boundaries = torch.arange(0, case.B * case.T + 1, case.T, device=q.device, dtype=torch.int32)

        @functools.cache
        def layer() -> Callable:
            sizes = {"head_dim": case.K, "num_heads": case.HQ, "num_kv_heads": case.H, "window_size": case.window}
            blocks = {"kernel_size": case.block, "stride": case.block, "block_size": case.block, "top_n": case.blocks}
            return core(config(**sizes, **blocks))

        found["SFNSA"] = lambda: layer()(*(x.flatten(0, 1) for x in (q, k, v, gates)), boundaries).view_as(q)
    return found


def _flex(case: Case, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Callable[[], Tensor]:
    """Return FlexAttention with the selected blocks as a block mask, made before the measurement."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    group, size = case.HQ // case.H, case.block
    named = torch.zeros(case.B, case.T, case.H, case.T // size + 1, dtype=torch.bool, device=q.device)
    named.scatter_(3, torch.where(blocks < 0, case.T // size, blocks).long(), True)

    def seen(b, h, i, j):
        return (j <= i) & named[b, i, h // group, j // size]

    mask = torch.compile(create_block_mask)(seen, case.B, case.HQ, case.T, case.T, device=q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        x = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*x, block_mask=mask, enable_gqa=group > 1).transpose(1, 2)

    return run


def _repeats(device: str) -> int:
    return 3 if device == "cpu" else 50
