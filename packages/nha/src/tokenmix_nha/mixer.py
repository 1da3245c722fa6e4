"""The layer: projections, gates, positions, and attention to slots and window in every form that the paper compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.chunking import packed_positions
from tokenmix_core.fields import check_value
from tokenmix_core.modeling import KVState, LayerState, Mixer, MixerOutput, register_mixer
from tokenmix_core.nn.attention import cached_attention_lse, mean_visible
from tokenmix_core.nn.mixer import stepping
from tokenmix_core.nn.norm import RMSNorm
from tokenmix_core.nn.precision import at_least_float32
from tokenmix_core.nn.rotary import Rotation, apply_rotary
from tokenmix_core.ops import attention
from tokenmix_core.ops.common import AttentionOutput, Impl
from tokenmix_nha.ablations import Entering, attend_jointly, attend_to_slots, delayed, slot_share
from tokenmix_nha.ops import SlotWindowState, slot_window_attention, slot_window_attention_step
from tokenmix_nha.state import SlotWindowPart
from tokenmix_nha.windows import FULL, Window, check_window

Positions = Literal["window", "both", "none", "learned"]
Fusion = Literal["softmax", "fixed", "learned"]
# fields of the configuration that the layer is made of
OPTIONS = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "slots",
    "positions",
    "fusion",
    "token_shift",
    "long_weight",
    "gate_normalizer",
    "qk_norm",
    "qkv_bias",
    "impl",
)


class NhaMixer(Mixer):
    """o_t = softmax(q_t [K_long; K_short]ᵀ / √K) [V_long; V_short]; y = W_o o (equations 1 to 4).

    q, k and v are projections of x; the gates of the M slots are α = sigmoid(W_f x)^(1/τ). The window may change from
    call to call: 0 leaves the slots (gated slot attention), "full" is softmax attention with M zero keys before it.

    Args:
        hidden_size: D.
        num_heads: query heads HQ.
        num_kv_heads: heads H of keys, values and slots, a divisor of HQ; None for HQ.
        head_dim: K = V; None for D / HQ.
        slots: M; 0 leaves plain attention to the window, which no gates then belong to.
        window: tokens that are seen exactly, 0 or more, or "full".
        positions: "window" rotates queries and keys for the window alone, "both" for the slots too, "none" does not;
            "learned" adds a vector for each position to both, for the window alone.
        fusion: "softmax" over slots and window together, or a sum of what each gives alone, of a "fixed" weight or of
            one "learned" from the token, for each head. Only layers with slots and a finite window above 0 differ.
        token_shift: False lets a token enter the slots at once, while the window still holds it; only in such layers.
        long_weight: the fixed weight of the slots.
        gate_normalizer: τ.
        qk_norm: RMS-normalise every head of q and k before rotating (Qwen3).
        qkv_bias: biases of the q, k, v and gate projections (Qwen2).
        o_bias: a bias of the output projection.
        max_positions: vectors that "learned" positions have; positions count modulo their number.
        norm_eps: of the q/k norms.
        impl: implementation of the operations.

    Raises:
        ValueError: unknown choices, or sizes that do not fit.

    Attributes:
        window: the window in use.
        shares: None, or a list to which every call without a cache adds ω_L `[B, T, HQ]`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        slots: int = 64,
        window: Window = 32,
        positions: Positions = "window",
        fusion: Fusion = "softmax",
        token_shift: bool = True,
        long_weight: float = 0.5,
        gate_normalizer: float = 8.0,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        o_bias: bool = False,
        max_positions: int = 4096,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_choices(slots, window, positions, fusion, token_shift, long_weight, gate_normalizer)
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"without head_dim, num_heads must divide hidden_size, got {num_heads} and {hidden_size}")
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        rotates = positions in ("window", "both")
        if rotates and head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
        self.num_heads, self.num_kv_heads, self.head_dim, self.slots = num_heads, num_kv_heads, head_dim, slots
        self.window, self.positions, self.fusion, self.token_shift = window, positions, fusion, token_shift
        self.long_weight, self.gate_normalizer = long_weight, gate_normalizer
        self.impl: Impl | None = impl
        self.rotary_dim = head_dim if rotates else None
        self.shares: list[Tensor] | None = None
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.f_proj = nn.Linear(hidden_size, num_kv_heads * slots, bias=qkv_bias) if slots else None
        self.weight_proj = nn.Linear(hidden_size, num_heads) if fusion == "learned" and slots else None
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=o_bias)
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        learned = positions == "learned"
        self.q_positions = nn.Embedding(max_positions, num_heads * head_dim) if learned else None
        self.k_positions = nn.Embedding(max_positions, num_kv_heads * head_dim) if learned else None

    @classmethod
    def from_config(cls, config: Any, layer_idx: int, **options: Any) -> NhaMixer:
        fields = {name: getattr(config, name) for name in OPTIONS}
        fields |= {"window": config.window[layer_idx], "max_positions": config.max_position_embeddings}
        return cls(config.hidden_size, norm_eps=config.norm_eps, **fields | options)

    @property
    def seen(self) -> int | None:
        """Tokens of the window; None when it is full."""
        return self.window if isinstance(self.window, int) else None

    @property
    def joined(self) -> bool:
        """Whether slots and window are under one softmax in the paper's form, which the operation computes."""
        return self.window == 0 or (self.fusion == "softmax" and self.token_shift)

    def make_state(self) -> LayerState:
        heads, dim = self.num_kv_heads, self.head_dim
        if self.seen is None or not self.slots:
            return LayerState(kv=KVState(heads, dim, dim, window=self.seen))
        own_keys = self.seen > 0 and self.positions in ("window", "learned")
        if self.joined:
            slots = SlotWindowPart(heads, self.slots, dim, dim, self.seen, own_slot_keys=own_keys)
            return LayerState(slots=slots)
        places = self.seen if self.token_shift else 0
        return LayerState(
            kv=KVState(heads, dim, dim, window=self.seen),
            slots=SlotWindowPart(heads, self.slots, dim, dim, places),
        )

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        q = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(hidden_states).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(hidden_states).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        slots_qk = None if self.positions in ("both", "none") else (q, k)
        if self.rotary_dim is not None:
            assert rotary is not None
            turned = apply_rotary(q, rotary), apply_rotary(k, rotary)
        elif self.q_positions is not None and self.k_positions is not None:
            turned = self._with_positions(q, k, state, cu_seqlens)
        else:
            turned = q, k
        step = stepping(hidden_states, state)
        f = self._gates(hidden_states)
        if self.window == FULL or f is None:
            o = self._attend_plainly(*turned, v, state, cu_seqlens, step)
        elif self.joined:
            # without a window nothing is turned but what the slots see turned, too
            seen_qk = slots_qk if slots_qk and self.window == 0 else turned
            o = self._attend(*seen_qk, v, f, slots_qk, state, cu_seqlens, step)
        else:
            weight = self._weight(hidden_states)
            o = self._attend_apart(*turned, v, f, slots_qk or turned, weight, state, cu_seqlens, step)
        if self.shares is not None and state is None:
            self.shares.append(self._share(hidden_states, *turned, v, f, slots_qk or turned, cu_seqlens).detach())
        o = self.o_proj(o.flatten(-2))
        return self._keep_in_graph(o), None

    def _gates(self, x: Tensor) -> Float[Tensor, "B T H M"] | None:
        """Natural logs of the gates; None where the layer has no slots, or none that a token could enter."""
        if self.f_proj is None or self.window == FULL:
            return None
        f = at_least_float32(self.f_proj(x)).unflatten(-1, (self.num_kv_heads, self.slots))
        return F.logsigmoid(f) / self.gate_normalizer

    def _weight(self, x: Tensor) -> Float[Tensor, "B T HQ"] | float | None:
        """The weight of the slots in a sum; None for one softmax."""
        if self.fusion == "softmax":
            return None
        return self.long_weight if self.weight_proj is None else at_least_float32(self.weight_proj(x)).sigmoid()

    def _with_positions(
        self, q: Tensor, k: Tensor, state: LayerState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert self.q_positions is not None
        assert self.k_positions is not None
        if state is not None:
            positions = state.span.positions.view(*q.shape[:2])
        elif cu_seqlens is not None:
            positions = packed_positions(cu_seqlens, q.shape[1]).unsqueeze(0)
        else:
            positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        positions = positions % self.q_positions.num_embeddings
        of_q, of_k = self.q_positions(positions), self.k_positions(positions)
        # under autocast the tables are wider than what they are added to
        of_q, of_k = of_q.unflatten(-1, q.shape[2:]).to(q.dtype), of_k.unflatten(-1, k.shape[2:]).to(k.dtype)
        return q + of_q, k + of_k

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        slots_qk: tuple[Tensor, Tensor] | None,
        state: LayerState | None,
        cu_seqlens: Tensor | None,
        step: bool,
    ) -> Float[Tensor, "B T HQ V"]:
        """Slots and window under one softmax."""
        # without a window the queries and keys are those of the slots
        q_slots, k_slots = (None, None) if slots_qk is None or self.window == 0 else slots_qk
        if step and state is not None:
            b_q, b_k, b_v, b_f = (x.squeeze(1) for x in (q, k, v, f))
            b_qs, b_ks = (None if x is None else x.squeeze(1) for x in (q_slots, k_slots))
            past = state.slots.get(len(q), q)
            o = slot_window_attention_step(b_q, b_k, b_v, b_f, past, q_slots=b_qs, k_slots=b_ks, impl=self.impl)
            return o.unsqueeze(1)
        o, after = slot_window_attention(
            q,
            k,
            v,
            f,
            window=self.seen or 0,
            q_slots=q_slots,
            k_slots=k_slots,
            initial_state=None if state is None else state.slots.value,
            cu_seqlens=cu_seqlens,
            output_final_state=state is not None,
            impl=self.impl,
        )
        if state is not None:
            state.slots.set(after)
        return o

    def _attend_plainly(
        self, q: Tensor, k: Tensor, v: Tensor, state: LayerState | None, cu_seqlens: Tensor | None, step: bool
    ) -> Float[Tensor, "B T HQ V"]:
        """Softmax attention, with M zero keys before it where the layer has slots."""
        if state is None and self.slots:
            # one kernel for the zero keys too; it needs no gates to know that none is open
            closed = v.new_zeros(1, 1, 1, 1).expand(*v.shape[:3], self.slots)
            options = {"cu_seqlens": cu_seqlens, "output_final_state": False, "impl": self.impl}
            return slot_window_attention(q, k, v, closed, window=q.shape[1], **options).o
        return with_zero_slots(self._window(q, k, v, state, cu_seqlens, step), self.slots)

    def _window(
        self, q: Tensor, k: Tensor, v: Tensor, state: LayerState | None, cu_seqlens: Tensor | None, step: bool
    ) -> AttentionOutput:
        """Attention to the window alone."""
        if state is not None:
            return cached_attention_lse(q, k, v, state.kv, state.span, step=step, impl=self.impl)
        return attention(q, k, v, window=self.seen, cu_seqlens=cu_seqlens, impl=self.impl)

    def _attend_apart(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor,
        slots_qk: tuple[Tensor, Tensor],
        weight: Tensor | float | None,
        state: LayerState | None,
        cu_seqlens: Tensor | None,
        step: bool,
    ) -> Float[Tensor, "B T HQ V"]:
        """The ablated forms."""
        window = self._window(q, k, v, state, cu_seqlens, step)
        before, entering = self._entering(slots_qk[1], v, f, state, cu_seqlens)
        q_slots, carried = slots_qk[0], state is not None
        if weight is None:
            o, after = attend_jointly(q_slots, entering, before, cu_seqlens, window, carried=carried)
        else:
            long, after = attend_to_slots(q_slots, entering, before, cu_seqlens, self.impl)
            share = weight.unsqueeze(-1) if isinstance(weight, Tensor) else weight
            o = (share * long + (1 - share) * window.o).to(v.dtype)
        if state is not None:
            assert after is not None
            state.slots.set(after)
        return o

    def _entering(
        self, k: Tensor, v: Tensor, f: Tensor, state: LayerState | None, cu_seqlens: Tensor | None
    ) -> tuple[SlotWindowState, Entering]:
        """The slots' state before the call, and the tokens that enter them."""
        sequences = len(k) if cu_seqlens is None else len(cu_seqlens) - 1
        if state is not None:
            before = state.slots.get(sequences, v)
        else:
            places = (self.seen or 0) if self.token_shift else 0
            part = SlotWindowPart(self.num_kv_heads, self.slots, self.head_dim, self.head_dim, places)
            before = part.empty(sequences, v)
        return before, delayed(k, v, f, before, cu_seqlens)

    def _share(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        f: Tensor | None,
        slots_qk: tuple[Tensor, Tensor],
        cu_seqlens: Tensor | None,
    ) -> Float[Tensor, "B T HQ"]:
        """ω_L of the call."""
        shape = q.shape[:3]
        if not self.slots or self.window == 0:
            return q.new_full(shape, 1.0 if self.slots else 0.0)
        if f is not None and self.fusion != "softmax":
            weight = self._weight(x)
            return weight if isinstance(weight, Tensor) else q.new_full(shape, self.long_weight)
        lse = self._window(q, k, v, None, cu_seqlens, False).lse
        if f is None:
            return (_log_slots(lse, self.slots) - lse).sigmoid()
        _, entering = self._entering(slots_qk[1], v, f, None, cu_seqlens)
        return slot_share(slots_qk[0], entering, cu_seqlens, lse)

    def _keep_in_graph(self, o: Tensor) -> Tensor:
        """o, with gradients of zero for parameters that this window does not use: distributed training waits for all.

        Which ones are used may change from step to step, and differ between layers.
        """
        if not (self.training and torch.is_grad_enabled()):
            return o
        full = self.seen is None or self.seen >= o.shape[1]
        unused: list[nn.Module | None] = [self.f_proj] if full else []
        if self.joined or self.window == FULL:
            unused.append(self.weight_proj)
        if self.window == 0:
            unused += [self.q_positions, self.k_positions]
        # the sum of no element
        zeros = [p.flatten()[:0].sum() for module in unused if module is not None for p in module.parameters()]
        return o + torch.stack(zeros).sum().to(o.dtype) if zeros else o

    def mixing_flops(self, seq_len: int) -> float:
        # 4 K operations a visible key and query head; a slot is read as a key is, and updated with 2 (K + V)
        keys = 0.0 if self.window == 0 else mean_visible(seq_len, self.seen)
        slots = 0 if self.seen is None else self.slots
        read = 4.0 * self.num_heads * self.head_dim * (keys + slots)
        return read + 4.0 * self.num_kv_heads * self.head_dim * slots


@contextmanager
def observed_shares(mixers: list[NhaMixer]) -> Iterator[list[list[Tensor]]]:
    """Within it, calls without a cache record ω_L `[B, T, HQ]`: a list for each mixer, an entry for each call."""
    for mixer in mixers:
        mixer.shares = []
    try:
        yield [mixer.shares for mixer in mixers if mixer.shares is not None]
    finally:
        for mixer in mixers:
            mixer.shares = None


def with_zero_slots(out: AttentionOutput, slots: int) -> Float[Tensor, "B T HQ V"]:
    """The outputs of a softmax that also holds `slots` logits 0 with value 0."""
    if not slots:
        return out.o
    return (out.o * (out.lse - _log_slots(out.lse, slots)).sigmoid().unsqueeze(-1)).to(out.o.dtype)


def _log_slots(like: Tensor, slots: int) -> Tensor:
    return torch.full_like(like, slots).log()


def check_choices(
    slots: Any, window: Any, positions: Any, fusion: Any, token_shift: Any, long_weight: Any, gate_normalizer: Any
) -> None:
    """Raise a ValueError for what a layer cannot be."""
    check_value("slots", slots, int)
    check_value("positions", positions, Positions)
    check_value("fusion", fusion, Fusion)
    check_value("token_shift", token_shift, bool)
    if slots < 0:
        raise ValueError(f"slots must be at least 0, got {slots!r}")
    check_window(window, slots)
    if not 0 <= long_weight <= 1:
        raise ValueError(f"long_weight must be from 0 to 1, got {long_weight!r}")
    if not gate_normalizer > 0:
        raise ValueError(f"gate_normalizer must be positive, got {gate_normalizer!r}")


register_mixer("nha", NhaMixer)
