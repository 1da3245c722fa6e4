"""Base class of token mixers: how the backbone builds and runs a mixer, its state and its FLOPs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core._utils.validation import check_arguments, undefined
from tokenmix_core.nn.dtypes import KeepsFloat32
from tokenmix_core.nn.rotary import Rotation
from tokenmix_core.nn.state import Bounds, LayerState, Span

MixerOutput = tuple[Tensor, dict[str, Tensor] | None]


class Mixer(KeepsFloat32):
    """Base class of token mixers.

    A subclass takes `hidden_size`, `norm_eps` and keyword options of its own, which `mixer_options` of a configuration
    then accepts. It defines `forward`, `make_state` and `mixing_flops`, and `init_weights_` if it owns parameters or
    non-persistent buffers. It must be causal. It never sees padding: the backbone packs padded batches or, under
    torch.compile, moves padding behind the real tokens.

    Attributes:
        inputs: names of extra inputs of the model's `forward` that this mixer takes, if the caller gives them.
        rotary_dim: rotated channels of a head; None if the mixer needs no `rotary`.
        attention_impls: maps transformers' name of an attention implementation to a value of the mixer's `impl`; empty
            if the mixer has no attention.
        per_chunk: names of submodules whose input has one entry per chunk of `self.chunk` tokens, not one per token.
        takes_more_tokens: whether training may append padding tokens to each row (`modeling.lengths`). This requires
            that no output depends on later tokens or on their number, and that the mixer returns no auxiliary tensors,
            or `bounds_more_tokens`. Subclasses do not inherit the value.
        bounds_more_tokens: whether the mixer meets the requirement of `takes_more_tokens` only if `cu_seqlens` ends
            before the appended tokens; then only single rows and packed rows get more tokens.
        splits_sequences: whether the mixer's operations are those of `tokenmix_core.parallel`, so that rows can be
            split over ranks. Subclasses do not inherit the value.
        splits_prompts: whether a call on rows that are split over ranks leaves the complete states on every rank
            (`modeling.split_prefill`). Subclasses do not inherit the value.
        packs_states: whether one call can continue several packed sequences, given only `cu_seqlens`: sequence i starts
            from row i of every state, if all states have `StatePart.takes_slots`. Subclasses do not inherit the value.
        uses_slots: whether calls overwrite states in the slots of pools (`StatePart.slots`): decoding steps, and with
            `packs_states` also calls on whole sequences. Subclasses do not inherit the value.
        joint_layers: names of linear layers of one call of `projected` whose outputs may be slices of one tensor, so
            that `projections.join_weights` can join their weights. Subclasses do not inherit the value.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    rotary_dim: int | None = None
    attention_impls: ClassVar[dict[str, str]] = {}
    per_chunk: ClassVar[tuple[str, ...]] = ()
    takes_more_tokens: ClassVar[bool] = False
    bounds_more_tokens: ClassVar[bool] = False
    splits_sequences: ClassVar[bool] = False
    splits_prompts: ClassVar[bool] = False
    packs_states: ClassVar[bool] = False
    uses_slots: ClassVar[bool] = False
    joint_layers: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_config(cls, config: Any, layer_idx: int, **options: Any) -> Mixer:
        """Build the mixer of layer `layer_idx`; override this to read the index or more fields of the configuration."""
        return cls(config.hidden_size, norm_eps=config.norm_eps, **options)

    @classmethod
    def layer_type(cls, options: dict[str, Any]) -> str:
        """Return the entry of `config.layer_types` for a layer with these options, by default that of recurrent layers.

        Libraries read this entry: accelerate, for example, refuses to split a sequence over ranks in a recurrent layer.
        """
        return "linear_attention"

    @classmethod
    def check_options(cls, label: str, options: dict[str, Any]) -> None:
        """Raise a ValueError for an option that the constructor does not take, or a value of the wrong type."""
        known = [name for name in inspect.signature(cls.__init__).parameters if name not in _GIVEN]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(
                f"mixer_options[{label!r}]: unknown option {', '.join(map(repr, unknown))}; "
                f"{cls.__name__} has {', '.join(known)}"
            )
        check_arguments(cls.__init__, options, f"mixer_options[{label!r}]: ")

    @classmethod
    def prepare_input(cls, name: str, value: Any, span: Span, cu_seqlens: Tensor | None) -> Any:
        """Convert an extra input, once per call, to the form that layers take; by default per-token tensors are packed.

        Args:
            name: one of `inputs`.
            value: the caller's value. A tensor `[B, T, ...]` has one value per token, and is packed like the tokens.
            span: token layout of the call.
            cu_seqlens: boundaries of packed sequences.
        """
        per_token = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (span.batch, span.tokens)
        return span.pack(value) if per_token else value

    @classmethod
    def step_input(cls, name: str, value: Any, lengths: Callable[[], list[int]]) -> Any:
        """Convert an extra input of a decoding step to a form that a CUDA graph can read; unchanged by default.

        Args:
            name: one of `inputs`.
            value: the caller's value.
            lengths: returns the length of each sequence, or a single one if all are equal.

        Returns:
            A tensor of constant shape, or a value that is no tensor; one graph is captured for each such value.
        """
        return value

    @classmethod
    def request_input(cls, name: str, value: Any, prompt: int) -> Any:
        """Convert an extra input of a served request to the form of `batch_input`; by default a request can give none.

        Args:
            name: one of `inputs`.
            value: the caller's value; None if the request gives none.
            prompt: number of tokens of the request's prompt.

        Raises:
            ValueError: an invalid value, or an input that a request cannot give.
        """
        if value is not None:
            raise ValueError(f"{name} cannot be given for single requests")

    @classmethod
    def batch_input(cls, name: str, values: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> Any:
        """Return the extra input of a call whose rows are parts of several requests, padded on the left.

        Args:
            name: one of `inputs`.
            values: for each row, the value of its request that `request_input` returned.
            ranges: for each row, the position of its first token and the position after its last.
        """
        return None

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
        **inputs: Any,
    ) -> MixerOutput:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: `[B, T, D]`; packed sequences have B = 1.
            state: the layer's state, read and updated; `state.span` is the token layout. None without a cache.
            cu_seqlens: boundaries of packed sequences.
            rotary: angles of the tokens, if `rotary_dim` is set.
            inputs: the extra inputs that the class attribute `inputs` names.

        Returns:
            The outputs `[B, T, D]`, and None or a dictionary of tensors. A tensor whose name ends in `_loss` is a sum
            over tokens; the causal LM divides it by the number of predicted tokens and adds it to the loss. A name that
            ends in `_share` marks a fraction on which the layer's cost depends; speed measurements report its mean. All
            other tensors are returned to the caller.
        """
        raise undefined(
            self, "forward(hidden_states, *, state, cu_seqlens, rotary, **inputs)", "which mixes along time"
        )

    def declares(self, name: str) -> bool:
        """Return whether the mixer's own class, not a class that it inherits from, sets an attribute to True."""
        return name in vars(type(self)) and bool(getattr(self, name))

    def prefills_in_slots(self, state: LayerState) -> bool:
        """Return whether all calls can read and overwrite a state with the parts of `state` in slots of a pool."""
        declared = self.declares("packs_states") and self.declares("uses_slots")
        return declared and all(part.takes_slots for part in state.parts.values())

    def make_state(self) -> LayerState:
        """Return an empty state for the layer.

        Raises:
            ValueError: the subclass defines no states.
        """
        raise undefined(
            self,
            "make_state()",
            "which returns the LayerState that the layer keeps between calls, and which generation and caches need; "
            "generate(..., use_cache=False) does without",
        )

    def prepare_steps(self, state: LayerState) -> None:
        """Allocate, before `state.fix`, the tensors that a decoding step would otherwise allocate; by default none."""

    def step_form(self, span: Span) -> Hashable:
        """Return a key of a decoding step with the layout `span`: steps with equal keys run the same kernels.

        A CUDA graph is captured for each key. `span.count` needs no synchronisation, and `span.ends` at most one for
        all steps of a fixed cache.
        """
        return None

    def state_bounds(self, seq_len: int, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16) -> Bounds:
        """Return the minimum and maximum bytes of the layer's state for `batch_size` sequences of `seq_len` tokens.

        `dtype` is the activations' dtype. The bounds differ if the state's size depends on data.
        """
        return Bounds.sum(part.bounds(seq_len, batch_size, dtype) for part in self.make_state().parts.values())

    def state_bytes(self, seq_len: int, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
        """Return the maximum bytes of the layer's state; see `state_bounds`."""
        return self.state_bounds(seq_len, batch_size, dtype).most

    def mixing_flops(self, seq_len: int) -> float:
        """Return the forward FLOPs per token outside linear layers, averaged over the tokens of a causal sequence."""
        raise undefined(
            self,
            "mixing_flops(seq_len)",
            "which returns the operations of mixing a token; reports of utilisation need it",
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token: two per weight of every linear layer, plus `mixing_flops`."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 2.0 * weights + self.mixing_flops(seq_len)


_GIVEN = ("self", "hidden_size", "norm_eps")


def stepping(x: Tensor, state: LayerState | None) -> bool:
    """Return whether a call is a decoding step: one token of each sequence, a state to overwrite, no gradients.

    A step in slots continues the state in every slot, so sequences that start from an empty one take no step.
    """
    if state is None or state.span.tokens != 1 or state.span.mask is not None:
        return False
    begun = all(part.fresh is None for part in state.parts.values())
    return begun and not (torch.is_grad_enabled() and x.requires_grad)
