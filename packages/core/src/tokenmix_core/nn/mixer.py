"""The base of every token mixer: a module that the backbone can build, run, cache and count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
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

    A subclass takes `hidden_size` and `norm_eps` and its own keyword options, which are those that `mixer_options` of a
    configuration accepts; it defines `forward`, `make_state` and `mixing_flops`, and `init_weights_` if it owns
    parameters or non-persistent buffers. It is causal, and never meets padding: batches with padding reach it packed,
    or, in a graph that torch.compile traces, with padding where no real token sees it.

    Attributes:
        inputs: names of the extra inputs of the model's `forward` that this mixer takes, where they are given.
        rotary_dim: rotated channels of a head; None when it needs no `rotary`.
        attention_impls: by transformers' name of an implementation of attention, the value of the mixer's `impl`; empty
            where the mixer does not attend.
        takes_more_tokens: whether training may append tokens to each row (`modeling.lengths`), which shapes then have:
            no output depends on later tokens or on their number, and nothing is returned beside the outputs. A subclass
            does not inherit it.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    rotary_dim: int | None = None
    attention_impls: ClassVar[dict[str, str]] = {}
    takes_more_tokens: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Any, layer_idx: int, **options: Any) -> Mixer:
        """The mixer of a layer; override it to use more of the configuration, or the layer's index."""
        return cls(config.hidden_size, norm_eps=config.norm_eps, **options)

    @classmethod
    def check_options(cls, label: str, options: dict[str, Any]) -> None:
        """Raise a ValueError for an option that the constructor does not know, or a value of another kind than its."""
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
        """One of the extra inputs as the layers take it, made once a call; override it for other forms.

        Args:
            name: one of `inputs`.
            value: what the caller gave. A tensor `[B, T, ...]` is taken as one value a token, and packed as they are.
            span: where the call's tokens lie.
            cu_seqlens: boundaries of packed sequences.
        """
        per_token = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (span.batch, span.tokens)
        return span.pack(value) if per_token else value

    @classmethod
    def step_input(cls, name: str, value: Any, lengths: Callable[[], list[int]]) -> Any:
        """One of the extra inputs of a decoding step, as what is recorded takes it; override it for what changes.

        Args:
            name: one of `inputs`.
            value: what the caller gave.
            lengths: gives the tokens that each sequence holds, one number where all are alike.

        Returns:
            A tensor, always of one shape, or a value for which steps are recorded on their own.
        """
        return value

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
        **inputs: Any,
    ) -> MixerOutput:
        """Mix along time.

        Args:
            hidden_states: `[B, T, D]`; packed sequences have B = 1.
            state: what the layer keeps; read and updated. `state.span` says where the tokens lie. None without a cache.
            cu_seqlens: boundaries of packed sequences.
            rotary: angles of the tokens, when `rotary_dim` is set.
            inputs: the extra inputs named by `inputs`.

        Returns:
            The outputs `[B, T, D]`, and None or named tensors. Those whose name ends in `_loss` are sums over tokens,
            which the causal LM divides by the number of predicted tokens and adds to its loss; others are passed on.
        """
        raise undefined(
            self, "forward(hidden_states, *, state, cu_seqlens, rotary, **inputs)", "which mixes along time"
        )

    def make_state(self) -> LayerState:
        """Return an empty state for the layer.

        Raises:
            ValueError: the subclass does not define it.
        """
        raise undefined(
            self,
            "make_state()",
            "which returns the LayerState that the layer keeps between calls, and which generation and caches need; "
            "generate(..., use_cache=False) does without",
        )

    def prepare_steps(self, state: LayerState) -> None:
        """Make what a decoding step might make, before the state is fixed in memory; by default there is nothing."""

    def step_form(self, span: Span) -> Hashable:
        """Which of several forms a decoding step takes that `state.span` would be of; by default there is one.

        Steps of one form do the same on the device, whatever it holds, so that one of them can be recorded and
        repeated. `span.count` and `span.ends` may be asked, as what they tell is known to the host.
        """
        return None

    def state_bounds(self, seq_len: int, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16) -> Bounds:
        """Between how many bytes the layer keeps of `batch_size` sequences of `seq_len` tokens.

        Activations are of `dtype`; the bounds differ where data decide what is kept.
        """
        return Bounds.sum(part.bounds(seq_len, batch_size, dtype) for part in self.make_state().parts.values())

    def state_bytes(self, seq_len: int, batch_size: int = 1, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes the layer keeps at the most; see `state_bounds`."""
        return self.state_bounds(seq_len, batch_size, dtype).most

    def mixing_flops(self, seq_len: int) -> float:
        """Forward floating-point operations of mixing a token, linear layers left out, mean over a causal sequence."""
        raise undefined(
            self,
            "mixing_flops(seq_len)",
            "which returns the operations of mixing a token; reports of utilisation need it",
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Forward floating-point operations per token: two a weight of every linear layer, plus the mixing."""
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 2.0 * weights + self.mixing_flops(seq_len)


_GIVEN = ("self", "hidden_size", "norm_eps")


def stepping(x: Tensor, state: LayerState | None) -> bool:
    """Tell whether a call is a decoding step: one token of each sequence, a state to update in place, no gradients."""
    one = state is not None and state.span.tokens == 1 and state.span.mask is None
    return one and not (torch.is_grad_enabled() and x.requires_grad)
