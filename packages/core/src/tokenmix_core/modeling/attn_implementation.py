"""Map transformers' `attn_implementation` to the implementations of our mixers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenmix_core.nn.mixer import Mixer


def choose_attention(mixers: Iterable[Mixer], requested: Any) -> None:
    """Set `impl` of all attention mixers by `requested`, transformers' name of an implementation; None changes nothing.

    Raises:
        ValueError: a name without a corresponding implementation, or a model without attention.
    """
    if requested is None:
        return
    attending = [mixer for mixer in mixers if mixer.attention_impls]
    if not attending:
        raise ValueError(f"attn_implementation={requested!r} has no effect: no layer of the model has attention")
    for mixer in attending:
        if not isinstance(requested, str) or requested not in mixer.attention_impls:
            raise ValueError(
                f"attn_implementation must be None or one of {', '.join(map(repr, mixer.attention_impls))} for "
                f"{type(mixer).__name__}, got {requested!r}; None selects the fastest one"
            )
    for mixer in attending:
        mixer.impl = mixer.attention_impls[requested]  # type: ignore[assignment]


class ChoosesAttention:
    """Base class to list before `PreTrainedModel`: `attn_implementation` selects an implementation of our mixers."""

    config: Any

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        # return the request unchanged: transformers would replace None by a default, as if the caller had requested
        # that default
        return attn_implementation

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Use "eager", "sdpa" or "flash_attention_2" in the attention mixers from the next call on.

        Raises:
            ValueError: an implementation that the model's mixers do not have.
        """
        choose_attention((m for m in self.modules() if isinstance(m, Mixer)), attn_implementation)  # type: ignore[attr-defined]
        self.config._attn_implementation = attn_implementation
