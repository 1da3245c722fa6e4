"""The layer: projections, gates, positions, attention to slots and window, in all variants that the paper compares."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.chunking import packed_positions
from tokenmix_core.modeling import KVState, LayerState, Mixer, MixerOutput, register_mixer
from tokenmix_core.nn import (
    RMSNorm,
    Rotation,
    apply_rotary_to_both,
    at_least_float32,
    attention_heads,
    cached_attention_lse,
    mean_visible,
    output_linear,
    projected,
    stepping,
)
from tokenmix_core.ops import AttentionOutput, Impl, is_exporting, unless_gluon
from tokenmix_core.parallel import attention, current_shard
from tokenmix_nha.ablations import Entering, attend_jointly, attend_to_slots, delayed, share_of_slots
from tokenmix_nha.heads import Call, Heads
from tokenmix_nha.ops import (
    SlotWindowState,
    log_forget_gates,
    slot_window_attention_prefill,
    slot_window_attention_step,
)
from tokenmix_nha.ops.slot_window.prefix import share_of_zeros, with_zeros
from tokenmix_nha.options import Fusion, Positions, check_choices
from tokenmix_nha.split import slot_window_attention
from tokenmix_nha.state import SlotWindowPart
from tokenmix_nha.windows import FULL, WINDOW, Window


class NhaMixer(Mixer):
    """o_t = softmax(q_t [K_long; K_short]ᵀ / √K) [V_long; V_short]; y = W_o o (NHA paper, equations 1 to 4).

    q, k and v are projections of x. K_long and V_long are the M slots, with gates α = sigmoid(W_f x)^(1/τ); K_short and
    V_short are the keys and values in the window. The window may change between calls: with a window of 0 the layer is
    gated slot attention; with "full" it is softmax attention after M additional zero keys.

    Args:
        hidden_size: D.
        num_heads: query heads HQ.
        num_kv_heads: heads H of keys, values and slots, a divisor of HQ; None for HQ.
        head_dim: K = V; None for D / HQ.
        slots: number of slots M; with 0 the layer is plain attention to the window, without gates.
        window: number of last tokens that a query sees exactly, an integer ≥ 0, or "full".
        positions: "window" rotates queries and keys for the window only, "both" also those for the slots, "none"
            neither; "learned" adds a learned vector per position to the window's queries and keys.
        fusion: "softmax" is one softmax over slots and window. "fixed" and "learned" add their separate outputs, with a
            fixed weight, or with a weight per head that is projected from the token. It has an effect only in layers
            with slots and a finite window above 0.
        token_shift: if False, a token enters the slots immediately, while the window still contains it; it has an
            effect in the same layers as `fusion`.
        long_weight: the weight of the slots' output if `fusion` is "fixed".
        gate_normalizer: τ.
        qk_norm: whether every head of q and k is RMS-normalised before the rotation (as in Qwen3).
        qkv_bias: whether the q, k, v and gate projections have biases (as in Qwen2).
        o_bias: whether the output projection has a bias.
        max_positions: size of the table of "learned" positions, which are taken modulo this size; in a model the
            default is its `max_position_embeddings`.
        norm_eps: epsilon of the q/k norms.
        impl: implementation of the operations.

    Raises:
        ValueError: an unknown value of an option, or sizes that do not fit together.

    Attributes:
        window: the window in use.
        shares: None, or a list to which every call without a cache appends ω_L `[B, T, HQ]`, the slots' share of
            attention.
    """

    # "eager" replaces the whole operation by the reference, because one kernel computes both slots and window
    attention_impls: ClassVar[dict[str, str]] = {"eager": "reference"}

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        slots: int = 64,
        window: Window = WINDOW,
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
        check_choices(
            slots=slots,
            window=window,
            positions=positions,
            fusion=fusion,
            token_shift=token_shift,
            long_weight=long_weight,
            gate_normalizer=gate_normalizer,
        )
        num_kv_heads, head_dim = attention_heads("Nha", hidden_size, num_heads, num_kv_heads, head_dim)
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
        options = {"max_positions": config.max_position_embeddings} | options
        return cls(config.hidden_size, norm_eps=config.norm_eps, **options)

    @property
    def takes_more_tokens(self) -> bool:  # type: ignore[override]
        """True if training may append padding tokens to rows: not if `shares` is set, as ω_L must exclude them."""
        return self.shares is None

    @property
    def splits_sequences(self) -> bool:  # type: ignore[override]
        """True if sequences can be split over ranks.

        This needs a joint softmax or a full window, positions that are not learned, and `shares` to be None.
        """
        return (self.joined or self.window == FULL) and self.positions != "learned" and self.shares is None

    @property
    def packs_states(self) -> bool:  # type: ignore[override]
        """True if packed sequences can continue their states: not if positions are learned, which need the span."""
        return self.joined and self.positions != "learned"

    @property
    def uses_slots(self) -> bool:  # type: ignore[override]
        """True if all calls can use slots of pools."""
        return self.packs_states

    @property
    def seen(self) -> int | None:
        """Number of tokens in the window; None for a full window."""
        return self.window if isinstance(self.window, int) else None

    @property
    def joined(self) -> bool:
        """True if the fused operation computes the layer: window 0, or one softmax over both and the shift."""
        return self.window == 0 or (self.fusion == "softmax" and self.token_shift)

    @property
    def own_slot_keys(self) -> bool:
        """True if the slots have other queries and keys than the window."""
        return bool(self.seen) and self.positions in ("window", "learned")

    def make_state(self) -> LayerState:
        window = KVState(self.num_kv_heads, self.head_dim, self.head_dim, window=self.seen)
        if self.seen is None or not self.slots:
            return LayerState(kv=window)
        return LayerState(slots=self._slots_part()) if self.joined else LayerState(kv=window, slots=self._slots_part())

    def _slots_part(self) -> SlotWindowPart:
        """Return the part of the layer's state with the slots and a ring buffer of tokens that are not yet in them."""
        ring_size = (self.seen or 0) if self.token_shift else 0
        sizes = self.num_kv_heads, self.slots, self.head_dim, self.head_dim
        return SlotWindowPart(*sizes, ring_size, own_slot_keys=self.joined and self.own_slot_keys)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        call = Call(state, cu_seqlens, stepping(hidden_states, state))
        heads = self._project(hidden_states, call, rotary)
        if heads.f is None:
            o = self._attend_plainly(heads, call)
        elif self.joined:
            o = self._attend(heads, call)
        else:
            o = self._attend_separately(heads, call)
        if self.shares is not None and state is None:
            self.shares.append(self._share_of_slots(heads, call).detach())
        return self._keep_in_graph(output_linear(o.flatten(-2), self.o_proj)), None

    def _project(self, x: Tensor, call: Call, rotary: Rotation | None) -> Heads:
        gates = None if self.window == FULL else self.f_proj
        q, k, v, f = projected(x, self.q_proj, self.k_proj, self.v_proj, gates)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k, v = (y.unflatten(-1, (self.num_kv_heads, self.head_dim)) for y in (k, v))
        f = None if f is None else f.unflatten(-1, (self.num_kv_heads, self.slots))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        positioned = q, k
        if self.rotary_dim is not None:
            assert rotary is not None
            positioned = apply_rotary_to_both(q, k, rotary)
        elif self.q_positions is not None and self.k_positions is not None:
            positioned = self._with_positions(q, k, call)
        if f is not None and not (call.step and self.joined):
            # in decoding steps f stays logits, because the operation itself computes log-gates from them
            f = log_forget_gates(f, normalizer=self.gate_normalizer)
        return Heads(*positioned, v, *(positioned if self.positions == "both" else (q, k)), f, self._weight(x))

    def _weight(self, x: Tensor) -> Float[Tensor, "B T HQ"] | None:
        if self.fusion == "softmax" or not self.slots or self.window in (0, FULL):
            return None
        if self.weight_proj is not None:
            return at_least_float32(output_linear(x, self.weight_proj)).sigmoid()
        return x.new_full((1, 1, 1), self.long_weight, dtype=torch.promote_types(x.dtype, torch.float32))

    def _with_positions(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        assert self.q_positions is not None
        assert self.k_positions is not None
        if call.state is not None:
            positions = call.state.span.positions.view(*q.shape[:2])
        elif call.cu_seqlens is not None:
            positions = packed_positions(call.cu_seqlens, q.shape[1]).unsqueeze(0)
        else:
            positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
        positions = positions % self.q_positions.num_embeddings
        embed_q, embed_k = self.q_positions(positions), self.k_positions(positions)
        # under autocast the tables are float32, but q and k have 16 bits
        embed_q = embed_q.unflatten(-1, q.shape[2:]).to(q.dtype)
        embed_k = embed_k.unflatten(-1, k.shape[2:]).to(k.dtype)
        return q + embed_q, k + embed_k

    def _attend(self, heads: Heads, call: Call) -> Float[Tensor, "B T HQ V"]:
        """Return the outputs of one softmax over slots and window, computed by the fused operation."""
        q, k, v, q_slots, k_slots, f, _ = heads
        assert f is not None
        if not self.window:
            q, k = q_slots, k_slots
        own = (q_slots, k_slots) if self.own_slot_keys else (None, None)
        options: dict[str, Any]
        held = None if call.state is None else call.state.slots.slots
        if call.step:
            assert call.state is not None
            b_q, b_k, b_v, b_f = (x.squeeze(1) for x in (q, k, v, f))
            b_qs, b_ks = (None if x is None else x.squeeze(1) for x in own)
            past = call.state.slots.get(len(q), q)
            options = {"q_slots": b_qs, "k_slots": b_ks, "impl": unless_gluon(self.impl), "slots": held}
            options["normalizer"] = self.gate_normalizer
            o = slot_window_attention_step(b_q, b_k, b_v, b_f, past, **options)
            return o.unsqueeze(1)
        if held is not None and call.state is not None:
            part = call.state.slots
            options = {"q_slots": own[0], "k_slots": own[1], "cu_seqlens": call.cu_seqlens, "impl": self.impl}
            return slot_window_attention_prefill(
                q, k, v, f, part.get(len(q), q), slots=held, fresh=part.fresh, **options
            )
        o, after = slot_window_attention(
            q,
            k,
            v,
            f,
            window=self.seen or 0,
            q_slots=own[0],
            k_slots=own[1],
            initial_state=None if call.state is None else call.state.slots.value,
            cu_seqlens=call.cu_seqlens,
            output_final_state=call.state is not None,
            impl=self.impl,
        )
        if call.state is not None:
            call.state.slots.set(after)
        return o

    def _attend_plainly(self, heads: Heads, call: Call) -> Float[Tensor, "B T HQ V"]:
        """Return the outputs of softmax attention to the window.

        If the layer has slots, the window is full, and M keys and values of zero join the softmax.
        """
        q, k, v = heads.q, heads.k, heads.v
        if call.state is None and self.slots and current_shard() is None and not is_exporting():
            # the fused operation adds the zero keys: log-gates of 0 let no token enter the slots, which stay zero
            closed = v.new_zeros(1, 1, 1, 1).expand(*v.shape[:3], self.slots)
            options = {"cu_seqlens": call.cu_seqlens, "output_final_state": False, "impl": self.impl}
            return slot_window_attention(q, k, v, closed, window=q.shape[1], **options).o
        return with_zeros(self._attend_to_window(heads, call), self.slots)

    def _attend_separately(self, heads: Heads, call: Call) -> Float[Tensor, "B T HQ V"]:
        """Return the outputs of an ablation: a weighted sum of slots and window, or one softmax without token shift."""
        window = self._attend_to_window(heads, call)
        before, entering = self._entering(heads, call)
        if heads.weight is None:
            carried = call.state is not None
            o, after = attend_jointly(heads.q_slots, entering, before, call.cu_seqlens, window, carried=carried)
        else:
            long, after = attend_to_slots(heads.q_slots, entering, before, call.cu_seqlens, self.impl)
            weight = heads.weight.unsqueeze(-1)
            o = (weight * long + (1 - weight) * window.o).to(heads.v.dtype)
        if call.state is not None:
            assert after is not None
            call.state.slots.set(after)
        return o

    def _attend_to_window(self, heads: Heads, call: Call) -> AttentionOutput:
        """Return output and log-sum-exp of attention to the window only."""
        q, k, v = heads.q, heads.k, heads.v
        if call.state is not None:
            return cached_attention_lse(q, k, v, call.state.kv, call.state.span, step=call.step, impl=self.impl)
        return attention(q, k, v, window=self.seen, cu_seqlens=call.cu_seqlens, impl=self.impl)

    def _entering(self, heads: Heads, call: Call) -> tuple[SlotWindowState, Entering]:
        """Return, for the ablations, the slots before the call and the tokens that enter them during it."""
        sequences = len(heads.v) if call.cu_seqlens is None else len(call.cu_seqlens) - 1
        part = self._slots_part() if call.state is None else call.state.slots
        before = part.get(sequences, heads.v)
        assert heads.f is not None
        return before, delayed(heads.k_slots, heads.v, heads.f, before, call.cu_seqlens)

    def _share_of_slots(self, heads: Heads, call: Call) -> Float[Tensor, "B T HQ"]:
        """Return ω_L for a call without a cache: the slots' share of the softmax, or their weight in a weighted sum."""
        shape = heads.q.shape[:3]
        if not self.slots or self.window == 0:
            return heads.q.new_full(shape, 1.0 if self.slots else 0.0)
        if heads.weight is not None:
            return heads.weight.expand(shape)
        lse = self._attend_to_window(heads, call).lse
        if heads.f is None:
            return share_of_zeros(lse, self.slots)
        return share_of_slots(heads.q_slots, self._entering(heads, call)[1], lse, call.cu_seqlens)

    def _keep_in_graph(self, o: Tensor) -> Tensor:
        """Add zero to o, so that parameters which this window does not use get zero gradients, as DDP requires.

        Which parameters are unused may change from step to step and differ between layers.
        """
        if not (self.training and torch.is_grad_enabled()):
            return o
        full = self.seen is None or self.seen >= o.shape[1]
        unused: list[nn.Module | None] = [self.f_proj] if full else []
        if self.joined or self.window == FULL:
            unused.append(self.weight_proj)
        if self.window == 0:
            unused += [self.q_positions, self.k_positions]
        # the sum of an empty slice is 0, but autograd regards it as depending on the parameter
        zeros = [p.flatten()[:0].sum() for module in unused if module is not None for p in module.parameters()]
        return o + torch.stack(zeros).sum().to(o.dtype) if zeros else o

    def mixing_flops(self, seq_len: int) -> float:
        # 4 K FLOPs per visible key and query head; a slot is read like a key, and updating it takes 2 (K + V) FLOPs
        keys = 0.0 if self.window == 0 else mean_visible(seq_len, self.seen)
        slots = 0 if self.seen is None else self.slots
        read = 4.0 * self.num_heads * self.head_dim * (keys + slots)
        return read + 4.0 * self.num_kv_heads * self.head_dim * slots


register_mixer("nha", NhaMixer)
