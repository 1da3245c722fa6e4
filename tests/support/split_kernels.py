"""The errors of kernels on rows that are split over ranks, beside those of unsplit kernels, relative to float64."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmix_core import parallel
from tokenmix_core.ops.gated_delta_rule import rank_split
from tokenmix_core.ops.ssd import rank_split as ssd_split
from tokenmix_core.parallel import SequenceShard, gather_rows, operations
from tokenmix_core.testing.interpreter import hurry


class Scan(NamedTuple):
    """A call of a recurrence with B rows of `tokens` tokens per rank.

    `decay` is the largest negated log-decay of a token; the first head has 20 times as much. `segment` replaces the
    least number of tokens per segment.
    """

    name: str = "gated delta rule"
    layout: str = "contiguous"
    batch: int = 1
    tokens: int = 256
    heads: tuple[int, int] = (1, 2)
    sizes: tuple[int, int] = (64, 64)
    decay: float = 0.05
    qk_l2norm: bool = True
    dtype: torch.dtype = torch.float32
    states: bool = True
    impl: str | None = "triton"
    device: str = "cpu"
    segment: int = 64


def scan_errors(group: dist.ProcessGroup, given: Scan) -> dict[str, tuple[float, float]]:
    """Return the errors of a split and an unsplit call, by output and gradient; nothing on ranks other than 0."""
    if given.device == "cpu":
        hurry()
    tokens = given.tokens * dist.get_world_size(group)
    shard = SequenceShard(tokens, layout=given.layout, group=group)  # type: ignore[arg-type]
    generator = torch.Generator(given.device).manual_seed(0)
    shape, (H, HV), (K, V) = (given.batch, shard.tokens), given.heads, given.sizes

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=given.device)

    inputs = {"q": random(*shape, H, K), "k": random(*shape, H, K), "v": random(*shape, HV, V)}
    if not given.qk_l2norm:
        inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs = {name: x.to(given.dtype) for name, x in inputs.items()}
    inputs["g"] = -given.decay * torch.rand((*shape, HV), generator=generator, device=given.device)
    inputs["g"][..., 0] *= 20
    delta, whole = given.name == "gated delta rule", {}
    inputs["beta" if delta else "dt"] = random(*shape, HV).sigmoid()
    options: dict[str, Any] = {"qk_l2norm": given.qk_l2norm} if delta else {}
    if not delta:
        whole["D"] = random(HV)
    if given.states:
        whole["initial_state"] = random(given.batch, HV, K, V)
    weight, of_final = random(*shape, HV, V), random(given.batch, HV, K, V)

    def differentiated(split: bool, exact: bool) -> dict[str, Tensor]:
        both = inputs | whole
        leaves = {name: (x.double() if exact else x.clone()).requires_grad_() for name, x in both.items()}
        x = {name: shard.split(leaves[name]) if split and name in inputs else leaves[name] for name in both}
        more = options | {"impl": "reference" if exact else given.impl}
        if split:
            more |= {"sequence_shard": shard, "final_states": given.states}
        out = (parallel.chunk_gated_delta_rule if delta else parallel.chunk_ssd)(**x, **more)
        loss = (out.o * (shard.split(weight) if split else weight)).sum()
        found = {"o": gather_rows(shard, out.o) if split else out.o}
        if given.states:
            # each rank's loss has a different fraction of the final states' weight; the fractions sum to 1
            share = 2.0 * (shard.rank + 1) / (shard.size * (shard.size + 1)) if split else 1.0
            loss, found["final_state"] = loss + share * (out.final_state * of_final).sum(), out.final_state
        grads = torch.autograd.grad(loss, list(leaves.values()))
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            found[f"d{name}"] = grad.to(torch.promote_types(leaf.dtype, torch.float32))
            if split:
                dist.all_reduce(found[f"d{name}"], group=group)
        return {name: x.detach().double() for name, x in found.items()}

    with (
        mock.patch.object(rank_split, "LEAST_ROW", given.segment),
        mock.patch.object(ssd_split, "segment_tokens", return_value=given.segment),
        mock.patch.object(operations, "split_recurrence", side_effect=AssertionError("not computed by kernels")),
    ):
        split = differentiated(True, False)
    if shard.rank:
        return {}
    exact, single = differentiated(False, True), differentiated(False, False)

    def error(x: Tensor, y: Tensor) -> float:
        return ((x - y).norm() / y.norm().clamp(min=1e-30)).item()

    return {name: (error(split[name], y), error(single[name], y)) for name, y in exact.items()}
