"""The rule by which heads retain keys, for forward passes over whole sequences and for decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.nn import Span
from tokenmix_core.ops import Impl
from tokenmix_core.parallel import HeadExchange
from tokenmix_lte.ops.eviction.reference import uniform_ranks
from tokenmix_lte.scorers import Scorer


class Tokens(NamedTuple):
    """The inputs of attention and of the scorer for the tokens of a call.

    Attributes:
        q, k: after rotation, `[B, T, HQ, K]` and `[B, T, H, K]`.
        raw: k before rotation.
        v: `[B, T, H, K]`.
    """

    q: Tensor
    k: Tensor
    raw: Tensor
    v: Tensor


class Retention(NamedTuple):
    """The scorer, sizes and options that decide which keys a layer retains; `Lte` describes them.

    Attributes:
        score_every: number of decoded tokens between two runs of the scorer.
        uniform: whether to retain every n-th token instead of tokens with positive logits.
    """

    scorer: Scorer | None
    window: int
    cap: int
    sinks: int
    score_every: int
    uniform: bool
    impl: Impl | None

    @property
    def context(self) -> tuple[int, int]:
        """Number of tokens before and after a token on which its logit depends."""
        return (0, 0) if self.scorer is None else (self.scorer.behind, self.scorer.ahead)

    @property
    def reach(self) -> int:
        """Number of newest tokens whose unrotated keys the state holds: those scored at once, and their context."""
        return 0 if self.scorer is None else self.score_every + sum(self.context)

    def scores_at(self, span: Span) -> bool:
        """Return True if the scorer runs on the newest tokens in the decoding step with the token layout `span`."""
        return self.scorer is not None and span.count > 0 and span.count % self.score_every == 0

    def logits(
        self, raw: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, heads: HeadExchange | None = None
    ) -> Float[Tensor, "B T H"]:
        """Return the retention logits (−1 without a scorer); a sequence's last `ahead` logits are not final.

        `heads` divides the heads among ranks if raw and v hold only this rank's heads.
        """
        if self.scorer is None:
            dtype = torch.promote_types(raw.dtype, torch.float32)
            return torch.full(raw.shape[:3], -1.0, dtype=dtype, device=raw.device)
        if heads is None:
            return self.scorer(raw, v, cu_seqlens=cu_seqlens)
        return self.scorer(raw, v, cu_seqlens=cu_seqlens, own=lambda x: heads.own(x, 0))

    def ranks(self, logits: Float[Tensor, "B T H"], position: Int[Tensor, "T"]) -> Float[Tensor, "B T H"]:
        """Return the ranks by which keys are retained: `uniform_ranks`, or positive logits (else −∞); +∞ for sinks."""
        if self.uniform:
            ranks = uniform_ranks(position).to(logits.dtype).view(1, -1, 1).expand_as(logits)
        else:
            ranks = logits.detach().masked_fill(~(logits > 0), -torch.inf)
        return ranks.masked_fill((position < self.sinks).unsqueeze(-1), torch.inf)
