"""TOVA: trained attention in constant memory, from which the token that gets the least attention is dropped."""

from __future__ import annotations

import functools
import warnings
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.nn.attention import Attention, mean_visible
from tokenmix_core.nn.mixer import MixerOutput
from tokenmix_core.nn.precision import at_least_float32
from tokenmix_core.nn.projections import project_out
from tokenmix_core.nn.rotary import Rotation, apply_rotary
from tokenmix_core.nn.state import LayerState, TensorState


class Held(NamedTuple):
    """Keys and values `[N, held, H, K]`, and how many places are filled `[N]`."""

    keys: Tensor
    values: Tensor
    filled: Tensor


class Tova(Attention):
    """Core's attention with its weights, of which at most `held` tokens stay: token omission via attention.

    After each token the one that its query gives the least attention, mean over query heads, is dropped for all heads
    where there is one too many; of equal ones that in the first place. In training it is attention to everything: the
    method needs none. Evaluation goes token by token in PyTorch's own operations, without a cache, too.

    Args:
        hidden_size: D.
        held: tokens that stay.
        num_heads, num_kv_heads, head_dim, rope, qk_norm, qkv_bias, norm_eps: as in `Attention`.

    Raises:
        ValueError: as `Attention`, or `held` below 1.
    """

    # it attends by PyTorch's own operations alone
    attention_impls: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        hidden_size: int,
        *,
        held: int = 1024,
        num_heads: int = 16,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope: bool = True,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-6,
    ):
        if held < 1:
            raise ValueError(f"Tova: held must be at least 1, got {held}")
        super().__init__(
            hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=rope,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            norm_eps=norm_eps,
        )
        self.held = held

    def make_state(self) -> LayerState:
        size = (self.held, self.num_kv_heads, self.head_dim)
        return LayerState(keys=TensorState(*size), values=TensorState(*size))

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        if self.training and state is None:
            return super().forward(hidden_states, cu_seqlens=cu_seqlens, rotary=rotary)
        q, k, v = self._heads(hidden_states, rotary)
        if state is not None:
            span = state.span
            N, filled = span.batch, span.before.clamp(max=self.held)
            keys, values = state.keys.get(span.sequences, k), state.values.get(span.sequences, v)
            # what is behind the N sequences is nobody's
            held = Held(keys[:N], values[:N], filled[:N])
            o, held = self._walk(tuple(span.unpack(x) for x in (q, k, v)), held, span.mask)
            state.keys.set(torch.cat((held.keys, keys[N:])))
            state.values.set(torch.cat((held.values, values[N:])))
            o = span.pack(o)
        elif cu_seqlens is None:
            o, _ = self._walk((q, k, v), self._empty(k), None)
        else:
            parts = [slice(i, j) for i, j in pairwise(cu_seqlens.tolist()) if i < j]
            o = torch.cat([self._walk(tuple(x[:, p] for x in (q, k, v)), self._empty(k), None)[0] for p in parts], 1)
        return project_out(o.flatten(-2), self.o_proj), None

    def mixing_flops(self, seq_len: int) -> float:
        # what is held is as large as a window
        return 4.0 * self.num_heads * self.head_dim * mean_visible(seq_len, self.held + 1)

    def _heads(self, x: Tensor, rotary: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.rotary_dim is not None:
            assert rotary is not None
            q, k = apply_rotary(q, rotary, self.q_norm), apply_rotary(k, rotary, self.k_norm)
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _empty(self, k: Tensor) -> Held:
        empty = k.new_zeros(len(k), self.held, *k.shape[2:])
        return Held(empty, empty, torch.zeros(len(k), dtype=torch.int64, device=k.device))

    def _walk(
        self, heads: tuple[Tensor, ...], held: Held, mask: Bool[Tensor, "N T"] | None
    ) -> tuple[Float[Tensor, "N T HQ K"], Held]:
        """Outputs for q, k, v token by token, zeros for padding, and what is held afterwards."""
        q, k, v = heads
        if q.shape[1] > 1:
            _say_once()
        outputs = []
        for t in range(q.shape[1]):
            o, after = self._token(q[:, t], k[:, t], v[:, t], held)
            if mask is not None:
                o = torch.where(mask[:, t, None, None], o, 0.0)
                after = Held(*(_where(mask[:, t], *pair) for pair in zip(after, held, strict=True)))
            outputs.append(o)
            held = after
        return torch.stack(outputs, 1), held

    def _token(self, q: Tensor, k: Tensor, v: Tensor, held: Held) -> tuple[Tensor, Held]:
        """One token's output `[N, HQ, K]`, and what stays."""
        keys, values = torch.cat((held.keys, k.unsqueeze(1)), 1), torch.cat((held.values, v.unsqueeze(1)), 1)
        places = torch.arange(self.held + 1, device=k.device)
        empty = (places >= held.filled.unsqueeze(1)) & (places < self.held)
        grouped = at_least_float32(q).unflatten(1, (self.num_kv_heads, -1)) * self.head_dim**-0.5
        scores = torch.einsum("nhgk,nphk->nhgp", grouped, at_least_float32(keys))
        weights = scores.masked_fill(empty[:, None, None], -torch.inf).softmax(-1)
        o = torch.einsum("nhgp,nphk->nhgk", weights, at_least_float32(values)).flatten(1, 2).to(v.dtype)
        # into the first empty place, or that of the token with the least attention, which may be its own
        least = weights.mean((1, 2)).argmin(1)
        to = torch.where(held.filled < self.held, held.filled, least)[:, None, None, None]
        keys, values = (
            x.scatter(1, to.expand(-1, 1, *x.shape[2:]), x[:, -1:])[:, :-1] for x in (keys.detach(), values.detach())
        )
        return o, Held(keys, values, (held.filled + 1).clamp(max=self.held))


def _where(rows: Bool[Tensor, "N"], new: Tensor, old: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


@functools.cache
def _say_once() -> None:
    warnings.warn("TOVA goes token by token, which is slow for long prompts", stacklevel=4)
