"""Load checkpoints, but refuse damaged or unfitting files."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tokenmix_core._utils.trust import is_trusted
from tokenmix_core.modeling.folder_checks import check_model_folder

# files that belong to a checkpoint besides configuration and weights
COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "added_tokens.json", "*.jinja")
_TOO_LARGE = ("Storage size calculation", "can't allocate memory", "not enough memory")
_DAMAGED = (SafetensorError, EOFError, pickle.UnpicklingError)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_checked(cls: type, load: Callable[..., Any], source: Any, *args: Any, strict: bool, **kwargs: Any):
    """Call `load(source, ...)`; for any fault of the checkpoint raise a ValueError that describes it.

    Raises:
        ValueError: the checkpoint is of another model type or cannot be read, or, if `strict`, weights are missing,
            unknown, of a wrong shape or not finite.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    integers: dict[str, str] = {}
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        integers = check_model_folder(Path(source, kwargs.get("subfolder") or ""))
    if strict:
        # let transformers accept mismatched sizes: they are reported below together with the other faults
        kwargs["ignore_mismatched_sizes"] = True
    try:
        model, info = load(source, *args, output_loading_info=True, **kwargs)
    except Exception as error:
        if isinstance(error, RuntimeError) and any(said in str(error) for said in _TOO_LARGE):
            raise ValueError(
                f"{source}: config.json has sizes that no memory can hold ({_first_line(error)})"
            ) from error
        # unpickling damaged weights can raise any error
        pickled = isinstance(source, str | os.PathLike) and any(Path(source).glob("*.bin"))
        if not isinstance(error, _DAMAGED) and (not pickled or isinstance(error, ValueError | OSError | ImportError)):
            raise
        raise ValueError(
            f"{source}: the weights cannot be read, the file is damaged or cut short ({_first_line(error)})"
        ) from error
    if strict:
        # not errors: an output layer's weight in the checkpoint if the model has no output layer (a backbone or a
        # classifier), and a missing head that a classifier adds
        head = set() if hasattr(model, "lm_head") else {"lm_head.weight"}
        new = getattr(cls, "new_weights", None)
        problems = {
            "missing": sorted(x for x in info["missing_keys"] if new is None or not x.startswith(new)),
            "unknown": sorted(set(info["unexpected_keys"]) - head),
            "misshapen": sorted(map(str, info["mismatched_keys"])),
        }
        if found := {kind: names for kind, names in problems.items() if names}:
            text = "; ".join(f"{len(names)} {kind} ({some(names)})" for kind, names in found.items())
            raise ValueError(
                f"{source}: the weights do not fit {cls.__name__}: {text}; "
                "from_pretrained(..., strict=False) loads it anyway"
            )
        if names := _floating(model, integers):
            raise ValueError(
                f"{source}: weights are not floating-point numbers: {len(names)} tensors ({some(names)}); quantized "
                "weights need the quantization_config of their library in config.json"
            )
        if names := not_finite(model):
            raise ValueError(
                f"{source}: weights are not finite: NaN or infinity in {len(names)} tensors ({some(names)}); "
                "from_pretrained(..., strict=False) loads it anyway"
            )
    return (model, info) if wants_info else model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _floating(model: nn.Module, integers: Mapping[str, str]) -> list[str]:
    """Return names and dtypes of tensors that are integers in the file but floating-point in the model."""
    known = {name: x.is_floating_point() for name, x in model.state_dict().items()} if integers else {}
    prefix = getattr(model, "base_model_prefix", "")
    return [
        f"{name} {dtype}"
        for name, dtype in sorted(integers.items())
        if any(known.get(each) for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")))
    ]


@torch.no_grad()
def not_finite(model: nn.Module) -> list[str]:
    """Return the names of plain floating-point tensors with NaN or infinity; reads each once and synchronises once."""
    extremes: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        # meta, sharded and quantised tensors are not checked
        if type(x) is Tensor and not x.is_meta and x.numel() and x.dtype in _FLOATS:
            # max − min is finite only if all elements are: NaN propagates to both, and infinity to the difference
            low, high = torch.aminmax(x)
            extremes[name] = high.double() - low.double()
    if not extremes:
        return []
    home = next(iter(extremes.values())).device
    finite = torch.stack([x.to(home) for x in extremes.values()]).isfinite().tolist()
    return [name for name, fine in zip(extremes, finite, strict=True) if not fine]


class CheckedLoading:
    """Base class to list before `PreTrainedModel`: `from_pretrained` refuses damaged or unfitting checkpoints."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, strict: bool = True, **kwargs) -> Any:
        """Load a checkpoint with transformers, but refuse one that is damaged or does not fit.

        Args:
            strict: whether to refuse missing or unknown weights; if False, missing weights are initialised and unknown
                ones ignored, with a warning.

        Raises:
            ValueError: the checkpoint is of another model type or cannot be read, or, if `strict`, does not fit the
                configuration or has weights that are not finite.
        """
        load = super().from_pretrained  # type: ignore[misc]
        # otherwise transformers may ask the user whether to run the `generate` in the checkpoint's folder
        kwargs.setdefault("trust_remote_code", is_trusted())
        return load_checked(cls, load, pretrained_model_name_or_path, *args, strict=strict, **kwargs)


def copy_companions(source: Path, out: Path) -> None:
    """Copy a checkpoint's tokenizer files and chat templates (`COMPANIONS`) to `out`."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy(file, out / file.name)


def some(names: list[str]) -> str:
    """Return the first few of `names`, joined to text for a message."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
