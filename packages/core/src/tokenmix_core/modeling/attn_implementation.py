"""transformers' `attn_implementation`, as the implementations that our mixers have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenmix_core.nn.mixer import Mixer


def choose_attention(mixers: Iterable[Mixer], requested: Any) -> None:
    """Let the mixers that attend use an implementation that transformers has a name for; None leaves them as they are.

    Raises:
        ValueError: a name that no mixer's implementation corresponds to, or a model without attention.
    """
    if requested is None:
        return
    attending = [mixer for mixer in mixers if mixer.attention_impls]
    if not attending:
        raise ValueError(f"attn_implementation={requested!r} means nothing here: no layer of the model attends")
    for mixer in attending:
        if not isinstance(requested, str) or requested not in mixer.attention_impls:
            raise ValueError(
                f"attn_implementation must be None or one of {', '.join(map(repr, mixer.attention_impls))} for "
                f"{type(mixer).__name__}, got {requested!r}; its own choice (None) is the fastest that runs right"
            )
    for mixer in attending:
        mixer.impl = mixer.attention_impls[requested]  # type: ignore[assignment]


class ChoosesAttention:
    """Before transformers' `PreTrainedModel`: `attn_implementation` chooses among our implementations."""

    config: Any

    def _check_and_adjust_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers would put a default here, which could not be told from a request
        return attn_implementation

    def set_attn_implementation(self, attn_implementation: str) -> None:
        """Let the mixers that attend use "eager", "sdpa" or "flash_attention_2" from the next call on.

        Raises:
            ValueError: what the model's mixers have no implementation for.
        """
        choose_attention((m for m in self.modules() if isinstance(m, Mixer)), attn_implementation)  # type: ignore[attr-defined]
        self.config._attn_implementation = attn_implementation
