"""Loading checkpoints without surprises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError


def load_checked(cls: type, load: Callable[..., Any], source: Any, *args: Any, strict: bool, **kwargs: Any):
    """Call `load(source, ...)`, and turn what is wrong with the checkpoint into a ValueError that says so.

    Raises:
        ValueError: a checkpoint of another kind of model, one that cannot be read, or, when strict, missing, unknown or
            misshapen weights.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    if strict:
        # reported below with the others
        kwargs["ignore_mismatched_sizes"] = True
    try:
        model, info = load(source, *args, output_loading_info=True, **kwargs)
    except (SafetensorError, EOFError) as error:
        raise ValueError(f"{source}: the weights cannot be read, the file is damaged or cut short ({error})") from error
    if strict:
        # the backbone alone may be taken from a language model's checkpoint
        head = set() if hasattr(model, "lm_head") else {"lm_head.weight"}
        problems = {
            "missing": sorted(info["missing_keys"]),
            "unknown": sorted(set(info["unexpected_keys"]) - head),
            "misshapen": sorted(map(str, info["mismatched_keys"])),
        }
        if found := {kind: names for kind, names in problems.items() if names}:
            text = "; ".join(f"{len(names)} {kind} ({_some(names)})" for kind, names in found.items())
            raise ValueError(f"{source}: the weights do not fit {cls.__name__}: {text}; strict=False loads it anyway")
    return (model, info) if wants_info else model


class CheckedLoading:
    """Before transformers' `PreTrainedModel`: `from_pretrained` refuses what is damaged or does not fit."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, strict: bool = True, **kwargs) -> Any:
        """Load a checkpoint, as transformers does, but refuse one that is damaged or does not fit.

        Args:
            strict: refuse weights that are missing or unknown; without it they are initialised, or left out, with a
                warning.

        Raises:
            ValueError: a checkpoint of another kind of model, one that cannot be read, or, when strict, one that does
                not fit the configuration.
        """
        load = super().from_pretrained  # type: ignore[misc]
        return load_checked(cls, load, pretrained_model_name_or_path, *args, strict=strict, **kwargs)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
