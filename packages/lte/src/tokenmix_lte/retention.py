"""The rule by which heads retain keys, used by forward passes over whole sequences and by decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.nn import Span
from tokenmix_core.ops import Impl
from tokenmix_lte.ops.eviction.reference import uniform_ranks
from tokenmix_lte.scorers import Scorer


class Tokens(NamedTuple):
    """Inputs of attention and of the scorer for the tokens of a call.

    Attributes:
        q, k: rotated, `[B, T, HQ, K]` and `[B, T, H, K]`.
        raw: k before it is rotated.
        v: `[B, T, H, K]`.
    """

    q: Tensor
    k: Tensor
    raw: Tensor
    v: Tensor


class Retention(NamedTuple):
    """The scorer, sizes and options that decide which keys a layer retains; `Lte` describes them.

    Attributes:
        score_every: decoded tokens between two runs of the scorer.
        uniform: retain every n-th token instead of those with positive logits.
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
        """How many tokens before and after a token its logit depends on."""
        return (0, 0) if self.scorer is None else (self.scorer.behind, self.scorer.ahead)

    @property
    def reach(self) -> int:
        """Number of newest tokens whose unrotated keys the state holds: those scored at once, and their context."""
        return 0 if self.scorer is None else self.score_every + sum(self.context)

    def scores_at(self, span: Span) -> bool:
        """Return True if the decoding step of this span runs the scorer on the newest tokens."""
        return self.scorer is not None and span.count > 0 and span.count % self.score_every == 0

    def logits(
        self, raw: Tensor, v: Tensor, *, begin: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Float[Tensor, "B T H"]:
        """Return the retention logits, −1 without a scorer; the last `ahead` logits of a sequence are not final."""
        if self.scorer is None:
            dtype = torch.promote_types(raw.dtype, torch.float32)
            return torch.full(raw.shape[:3], -1.0, dtype=dtype, device=raw.device)
        return self.scorer(raw, v, begin=begin, cu_seqlens=cu_seqlens)

    def ranks(self, logits: Float[Tensor, "B T H"], position: Int[Tensor, "T"]) -> Float[Tensor, "B T H"]:
        """Return the ranks by which keys are retained: positive logits, else −∞, or `uniform_ranks`; +∞ for sinks."""
        if self.uniform:
            ranks = uniform_ranks(position).to(logits.dtype).view(1, -1, 1).expand_as(logits)
        else:
            ranks = logits.detach().masked_fill(~(logits > 0), -torch.inf)
        return ranks.masked_fill((position < self.sinks).unsqueeze(-1), torch.inf)
