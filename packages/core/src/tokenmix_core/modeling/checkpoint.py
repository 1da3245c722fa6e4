"""Loading checkpoints without surprises."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tokenmix_core._utils.trust import is_trusted

# what belongs to a checkpoint beside its model
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "added_tokens.json", "*.jinja")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_checked(cls: type, load: Callable[..., Any], source: Any, *args: Any, strict: bool, **kwargs: Any):
    """Call `load(source, ...)`, and turn what is wrong with the checkpoint into a ValueError that says so.

    Raises:
        ValueError: a checkpoint of another kind of model, one that cannot be read, or, when strict, missing, unknown or
            misshapen weights, or some that are not finite.
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
            text = "; ".join(f"{len(names)} {kind} ({some(names)})" for kind, names in found.items())
            raise ValueError(
                f"{source}: the weights do not fit {cls.__name__}: {text}; "
                "from_pretrained(..., strict=False) loads it anyway"
            )
        if names := not_finite(model):
            raise ValueError(
                f"{source}: weights are not finite: NaN or infinity in {len(names)} tensors ({some(names)}); "
                "from_pretrained(..., strict=False) loads it anyway"
            )
    return (model, info) if wants_info else model


@torch.no_grad()
def not_finite(model: nn.Module) -> list[str]:
    """The names of a model's tensors that hold NaN or infinity: each is read once, and the device waited for once."""
    extremes: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        # tensors that are elsewhere, sharded or quantized are left to those who made them so
        if type(x) is Tensor and not x.is_meta and x.numel() and x.dtype in _FLOATS:
            # NaN reaches both ends; a difference with an infinity is never finite
            low, high = torch.aminmax(x)
            extremes[name] = high.double() - low.double()
    if not extremes:
        return []
    home = next(iter(extremes.values())).device
    finite = torch.stack([x.to(home) for x in extremes.values()]).isfinite().tolist()
    return [name for name, fine in zip(extremes, finite, strict=True) if not fine]


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
                not fit the configuration or has weights that are not finite.
        """
        load = super().from_pretrained  # type: ignore[misc]
        # else transformers may ask whether to run a folder's own `generate`
        kwargs.setdefault("trust_remote_code", is_trusted())
        return load_checked(cls, load, pretrained_model_name_or_path, *args, strict=strict, **kwargs)


def copy_companions(source: Path, out: Path) -> None:
    """Copy what belongs to a checkpoint beside its model, such as the tokenizer, to another folder."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy(file, out / file.name)


def some(names: list[str]) -> str:
    """The first of many names, for a sentence."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
