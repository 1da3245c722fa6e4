"""Time the Oryx mixer, forward and backward, by length and share of attention, beside the FLOPs of appendix E.

"mixer" is the layer of the 1.4B model with its projections; "mixing" excludes the six large projections. In mixed modes
"mixing" includes a copy that the layer does not need, because it reads slices of one GEMM's output. Both are compiled,
as in training with `torch_compile`. Share 1 is attention alone, without a linear state; other shares have evenly spaced
chunks of 128 tokens in attention mode. The order of tokens, which a model computes once for all layers, is given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tokenmix_core.nn.rotary import RotaryEmbedding
from tokenmix_core.testing.benchmarking import interleaved_medians
from tokenmix_oryx.flops import mixer_flops
from tokenmix_oryx.mixer import OryxMixer
from tokenmix_oryx.modes import Modes
from tokenmix_oryx.options import FAMILIES

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SHARES = (0.0, 0.25, 0.5, 1.0)
TOKENS = 32768
WIDTH = 2048
CHUNK = 128
LARGE = ("attention_q_proj", "linear_q_proj", "k_proj", "v_proj", "g_proj", "o_proj")


def modes(share: float, batch: int, tokens: int, device: str) -> Modes:
    """Return modes with evenly spaced chunks in attention mode."""
    if share in (0.0, 1.0):
        return Modes("attention" if share else "linear")
    chunks = torch.arange(tokens // CHUNK, device=device)
    attends = ((chunks + 1) * share).floor() > (chunks * share).floor()
    return Modes(None, attends.repeat_interleave(CHUNK).expand(batch, -1).contiguous()).ordered()


def prepare(
    family: str, tokens: int, device: str, *, projections: bool = True, width: int = WIDTH, total: int = TOKENS
):
    """Return the functions to time, by fraction of attention, and the leaves and x; compile them by one call each."""
    head_dim = 128 if device != "cpu" else 16
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    mixer = OryxMixer(width, linear_mixer=family, head_dim=head_dim).to(device, dtype)
    if not projections:
        for name in LARGE:
            setattr(mixer, name, nn.Identity())
    batch = max(1, total // tokens)
    x = torch.randn(batch, tokens, width, device=device, dtype=dtype, requires_grad=True)
    rotary = RotaryEmbedding(head_dim, {"rope_theta": 1e4}).to(device)(torch.arange(tokens, device=device)[None])
    call = torch.compile(mixer, dynamic=False) if device != "cpu" else mixer
    leaves = (x, *(p for p in mixer.parameters() if p.dim() > 1))
    runs: dict[float, Callable[[], Tensor]] = {}
    for share in SHARES:
        mode = modes(share, batch, tokens, device)
        runs[share] = lambda mode=mode: call(x, rotary=rotary, mode=mode)[0]
        torch.autograd.grad(runs[share](), leaves, x.detach(), allow_unused=True)
    return runs, leaves, x


def time_shares(runs, leaves, x: Tensor, device: str, *, repeats: int) -> dict[float, float]:
    """Return the milliseconds of forward and backward by fraction of tokens in attention mode."""

    def step(run: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(), leaves, x.detach(), allow_unused=True)

    return interleaved_medians({share: step(run) for share, run in runs.items()}, device, repeats=repeats)


def rows_at(family: str, tokens: int, *, projections: bool, times: dict[float, float]) -> list[dict]:
    """Return the rows of one length, with the model's FLOPs relative to those of attention alone."""
    alone = mixer_flops(tokens, 1.0).attention_output
    none = dict.fromkeys(("fwd_ms", "peak_mb", "host_us", "first_call_s"))
    return [
        {
            "op": f"{'mixer' if projections else 'mixing'}, {family}",
            "shape": f"T{tokens}",
            "impl": f"attention share {share:g}",
            "fwdbwd_ms": ms,
            **none,
            "tokens": tokens,
            "attention_share": share,
            "flops": (alone if share == 1.0 else mixer_flops(tokens, share).total) / alone,
        }
        for share, ms in times.items()
    ]


def rows(device: str) -> list[dict]:
    """Measure on `device`: families, with and without projections, by length and fraction of attention."""
    lengths, sizes = (LENGTHS, {}) if device != "cpu" else ((256, 512), {"width": 64, "total": 512})
    out = []
    for family in FAMILIES:
        for projections in (True, False):
            for tokens in lengths:
                runs = prepare(family, tokens, device, projections=projections, **sizes)
                times = time_shares(*runs, device, repeats=30 if device != "cpu" else 3)
                out += rows_at(family, tokens, projections=projections, times=times)
    return out


def crossover_of(times: dict[int, dict[float, float]], share: float) -> int | None:
    """Return the first measured length from which on the mixed step is faster than attention alone."""
    faster = [tokens for tokens in sorted(times) if times[tokens][share] < times[tokens][1.0]]
    behind = [tokens for tokens in times if tokens not in faster]
    return min((tokens for tokens in faster if not behind or tokens > max(behind)), default=None)
