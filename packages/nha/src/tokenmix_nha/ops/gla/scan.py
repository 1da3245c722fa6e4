"""A matrix recurrence with one gate per row, computed chunkwise in plain PyTorch.

Queries multiply the rows or the columns of the matrix.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import packed_positions

# number C of tokens in a chunk; the decays between its tokens are a tensor [C, C, M]
CHUNK = 16
# a log-gate so low that it clears the state: exp(−10⁴) = 0 in float32
CLOSED = -1e4


class GatedScan:
    r"""The recurrence S_t = Diag(e^{g_t}) S_{t−1} + w_t ⊗ x_t of a matrix S `[M, D]`, which queries can then multiply.

    `rows` returns S_tᵀ q_t, the output of gated linear attention. Slots of keys and of values are two such recurrences;
    from the slots of keys, `columns` returns the logits S_t q_t. Differentiable by autograd; time and memory grow as T
    · C · M.

    Args:
        w: `[N, T, H, M]`, the weight with which each token enters each row.
        x: `[N, T, H, D]`, the entering vectors.
        g: `[N, T, H, M]`, natural log of the gates, ≤ 0.
        state: `[N, H, M, D]`, S before the first token; None stands for zero.
        cu_seqlens: boundaries of sequences packed into one row, each of which starts from S = 0; `state` must then be
            None.
    """

    def __init__(
        self,
        w: Float[Tensor, "N T H M"],
        x: Float[Tensor, "N T H D"],
        g: Float[Tensor, "N T H M"],
        state: Float[Tensor, "N H M D"] | None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    ):
        if state is None:
            state = x.new_zeros(w.shape[0], w.shape[2], w.shape[3], x.shape[3])
        elif cu_seqlens is not None:
            raise ValueError("a carried state belongs to one sequence a row, got cu_seqlens, too")
        self.tokens, self.cu_seqlens = w.shape[1], cu_seqlens
        self.chunk = min(CHUNK, max(self.tokens, 1))
        if cu_seqlens is not None:
            first = packed_positions(cu_seqlens, self.tokens) == 0
            g = g.masked_fill(first.view(1, -1, 1, 1), CLOSED)
        self.x = _chunks(x, self.chunk)
        w, g = _chunks(w, self.chunk), _chunks(g, self.chunk)
        self.decay = g.cumsum(2).exp()
        # the weight of token j in the state at token t, for the tokens of each chunk: [N, chunks, t, j, H, M]
        self.weight = _between(g) * w[:, :, None]
        added = torch.einsum("ncjhm,ncjhd->nchmd", self.weight[:, :, -1], self.x)
        self.before, self._last = _states(g.sum(2), added, state)

    @property
    def final(self) -> Float[Tensor, "N H M D"]:
        """S after the last token of each sequence."""
        if self.cu_seqlens is None:
            return self._last
        empty = self.cu_seqlens.diff() == 0
        end = (self.cu_seqlens[1:].long() - 1).clamp(min=0)
        i_c, i_t = end // self.chunk, end % self.chunk
        within = torch.einsum("njhm,njhd->nhmd", self.weight[0, i_c, i_t], self.x[0, i_c])
        final = self.decay[0, i_c, i_t].unsqueeze(-1) * self.before[0, i_c] + within
        return final.masked_fill(empty.view(-1, 1, 1, 1), 0)

    def rows(self, q: Float[Tensor, "N T HQ M"]) -> Float[Tensor, "N T HQ D"]:
        """Return S_tᵀ q_t; query head h reads head h // (HQ / H)."""
        q = self._queries(q)
        o = torch.einsum("ncthgm,nchmd->ncthgd", q * self.decay[:, :, :, :, None], self.before)
        scores = torch.einsum("ncthgm,nctjhm->ncthgj", q, self.weight)
        return self._joined(o + torch.einsum("ncthgj,ncjhd->ncthgd", scores, self.x))

    def columns(self, q: Float[Tensor, "N T HQ D"]) -> Float[Tensor, "N T HQ M"]:
        """Return S_t q_t; query head h reads head h // (HQ / H)."""
        q = self._queries(q)
        z = torch.einsum("ncthgd,nchmd->ncthgm", q, self.before) * self.decay[:, :, :, :, None]
        scores = torch.einsum("ncthgd,ncjhd->ncthgj", q, self.x)
        return self._joined(z + torch.einsum("ncthgj,nctjhm->ncthgm", scores, self.weight))

    def _queries(self, q: Tensor) -> Tensor:
        return _chunks(q, self.chunk).unflatten(3, (self.x.shape[3], -1))

    def _joined(self, x: Tensor) -> Tensor:
        return x.flatten(3, 4).flatten(1, 2)[:, : self.tokens]


def _chunks(x: Float[Tensor, "N T *rest"], size: int) -> Float[Tensor, "N chunks size *rest"]:
    padding = [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % size]
    return torch.nn.functional.pad(x, padding).unflatten(1, (-1, size))


def _between(g: Float[Tensor, "N chunks C H M"]) -> Float[Tensor, "N chunks C C H M"]:
    """Return for each chunk the decay from token j to token t, at `[t, j]`; 0 for j > t."""
    order = torch.arange(g.shape[2], device=g.device)
    # sum the log-gates between j and t, because a difference of cumulative sums would lose precision
    between = torch.where((order[:, None] > order)[..., None, None], g[:, :, :, None], 0).cumsum(2)
    return between.masked_fill((order[:, None] < order)[..., None, None], -torch.inf).exp()


def _states(
    g: Float[Tensor, "N T H M"], added: Float[Tensor, "N T H M D"], state: Float[Tensor, "N H M D"]
) -> tuple[Float[Tensor, "N T H M D"], Float[Tensor, "N H M D"]]:
    """Return S before each of T steps S ← Diag(e^{g_t}) S + added_t, and S after the last step.

    If there are more than `CHUNK` steps, the function splits them into chunks and calls itself.
    """
    steps = g.shape[1]
    if steps <= CHUNK:
        states = []
        for t in range(steps):
            states.append(state)
            state = g[:, t].exp().unsqueeze(-1) * state + added[:, t]
        return (torch.stack(states, 1) if states else added), state
    g, added = _chunks(g, CHUNK), _chunks(added, CHUNK)
    within = torch.einsum("nctjhm,ncjhmd->ncthmd", _between(g), added)
    before, last = _states(g.sum(2), within[:, :, -1], state)
    after = within + g.cumsum(2).exp().unsqueeze(-1) * before.unsqueeze(2)
    joined = torch.cat([before.unsqueeze(2), after[:, :, :-1]], 2).flatten(1, 2)
    return joined[:, :steps], last
