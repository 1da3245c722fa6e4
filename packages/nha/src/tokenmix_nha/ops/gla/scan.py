"""The recurrence of matrices under gates on their rows, chunkwise in plain PyTorch, with both ways of reading it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

# tokens of a chunk: weights between its tokens are formed for every row, [C, C, M]
CHUNK = 16


class GatedScan:
    r"""S_t = Diag(e^{g_t}) S_{t−1} + w_t ⊗ x_t, with S `[M, D]`, which queries read by its rows or its columns.

    Read by rows it is gated linear attention, o_t = S_tᵀ q_t; a key's and a value's slots are two such recurrences,
    whose logits are read by columns, z_t = S_t q_t. Differentiable by autograd; time and memory grow with T · C · M.

    Args:
        w: `[N, T, H, M]`, what enters the rows.
        x: `[N, T, H, D]`.
        g: `[N, T, H, M]`, natural log of the gates, ≤ 0.
        state: `[N, H, M, D]`, S before the first token.

    Attributes:
        final: S after the last token.
    """

    def __init__(
        self,
        w: Float[Tensor, "N T H M"],
        x: Float[Tensor, "N T H D"],
        g: Float[Tensor, "N T H M"],
        state: Float[Tensor, "N H M D"],
    ):
        self.tokens = w.shape[1]
        self.chunk = min(CHUNK, max(self.tokens, 1))
        self.x = self._chunks(x)
        w, g = self._chunks(w), self._chunks(g)
        self.decay = g.cumsum(2).exp()
        order = torch.arange(self.chunk, device=w.device)
        # the gates after token j up to token t; a sum, not a difference of sums: no digits lost
        between = torch.where((order[:, None] > order)[..., None, None], g[:, :, :, None], 0).cumsum(2)
        between = between.masked_fill((order[:, None] < order)[..., None, None], -torch.inf)
        # [N, chunks, t, j, H, M]
        self.weight = between.exp() * w[:, :, None]
        added = torch.einsum("ncjhm,ncjhd->nchmd", self.weight[:, :, -1], self.x)
        states = []
        for c in range(w.shape[1]):
            states.append(state)
            state = self.decay[:, c, -1, :, :, None] * state + added[:, c]
        self.before = torch.stack(states, 1) if states else state.unsqueeze(1)[:, :0]
        self.final = state

    def rows(self, q: Float[Tensor, "N T HQ M"]) -> Float[Tensor, "N T HQ D"]:
        """S_tᵀ q_t; query head h reads head h // (HQ / H)."""
        q = self._queries(q)
        o = torch.einsum("ncthgm,nchmd->ncthgd", q * self.decay[:, :, :, :, None], self.before)
        scores = torch.einsum("ncthgm,nctjhm->ncthgj", q, self.weight)
        return self._joined(o + torch.einsum("ncthgj,ncjhd->ncthgd", scores, self.x))

    def columns(self, q: Float[Tensor, "N T HQ D"]) -> Float[Tensor, "N T HQ M"]:
        """S_t q_t."""
        q = self._queries(q)
        z = torch.einsum("ncthgd,nchmd->ncthgm", q, self.before) * self.decay[:, :, :, :, None]
        scores = torch.einsum("ncthgd,ncjhd->ncthgj", q, self.x)
        return self._joined(z + torch.einsum("ncthgj,nctjhm->ncthgm", scores, self.weight))

    def _chunks(self, x: Tensor) -> Tensor:
        padding = [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % self.chunk]
        return torch.nn.functional.pad(x, padding).unflatten(1, (-1, self.chunk))

    def _queries(self, q: Tensor) -> Tensor:
        return self._chunks(q).unflatten(3, (self.x.shape[3], -1))

    def _joined(self, x: Tensor) -> Tensor:
        return x.flatten(3, 4).flatten(1, 2)[:, : self.tokens]
