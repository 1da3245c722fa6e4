"""Checks of a model's folder before anything in it is loaded or allocated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_LAYERS = 10_000
# maximum sizes: far beyond any model, yet a weight of two of the first three has fewer than 2**63 elements
_MOST = {"hidden_size": 2**24, "intermediate_size": 2**24, "vocab_size": 2**28, "num_hidden_layers": MOST_LAYERS}
_MOST |= {"max_position_embeddings": 2**40, "num_attention_heads": 2**20, "head_dim": 2**20}
_FLOATS = ("F16", "BF16", "F32", "F64")
_HEADER_BYTES = 2**27
INDEX = ".index.json"
_TYPES: dict[str, type | tuple[type, ...]] = {
    "model_type": str, "architectures": list, "dtype": str, "torch_dtype": str, "quantization_config": dict,
    "id2label": dict, "label2id": dict, "num_labels": int, "auto_map": dict, "problem_type": str, "use_cache": bool,
    "bos_token_id": int, "pad_token_id": int, "eos_token_id": (int, list),
}  # fmt: skip


def check_sizes(owner: Any, source: object = "") -> None:
    """Raise a ValueError for an implausible size, before memory is allocated for it.

    Args:
        owner: the configuration, as a mapping or an object.
        source: the configuration's folder, for the message.
    """
    for name, most in _MOST.items():
        value = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{source}{': ' if source else ''}{name} must be at most {most}, got {value}")


def index_parts(index: Path) -> dict[str, str]:
    """Return the file name of each tensor from the index of a sharded checkpoint.

    Raises:
        ValueError: the index cannot be read, or names a file outside its folder or a missing one.
    """
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is damaged: {error}") from error
    parts = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(parts, dict):
        raise ValueError(f"{index} is damaged: it must hold the files of the weights by name, as weight_map")
    for part in set(map(str, parts.values())):
        if Path(part).name != part:
            raise ValueError(f"{index} names {part}, which lies outside its folder; do not use this model")
        if not (index.parent / part).is_file():
            raise ValueError(f"{index.parent}: {index.name} names {part}, which is not there")
    return {str(name): str(part) for name, part in parts.items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each tensor in a safetensors file by name.

    Raises:
        ValueError: the file is damaged or cut short.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= min(_HEADER_BYTES, path.stat().st_size):
                raise ValueError("its header has no plausible size")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return {name: {"dtype": str(x["dtype"]), "shape": [int(n) for n in x["shape"]]} for name, x in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: the weights cannot be read, the file is damaged or cut short ({error})") from error


def check_model_folder(folder: Path) -> dict[str, str]:
    """Check configuration, index and file headers of a model's folder; check nothing if it has no config.json.

    Returns:
        The dtypes of tensors that are not floating-point numbers, by name; empty if the weights are quantized.

    Raises:
        ValueError: the configuration is not a dictionary or has implausible sizes or wrong types, the index names
            missing files or files outside the folder, a file is damaged, or the weights are far too small for the
            configuration.
    """
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder}: config.json must hold a dictionary of fields, and does not")
    check_sizes(config, folder)
    _check_types(config, folder)
    for index in folder.glob(f"*{INDEX}"):
        index_parts(index)
    headers: dict[str, dict[str, Any]] = {}
    for file in folder.glob("*.safetensors"):
        headers |= read_header(file)
    if headers:
        _check_elements(folder, config, sum(math.prod(x["shape"]) for x in headers.values()))
    if config.get("quantization_config") is not None:
        return {}
    return {name: x["dtype"] for name, x in headers.items() if x["dtype"] not in _FLOATS}


def _check_types(config: dict[str, Any], folder: Path) -> None:
    """Raise a ValueError for a wrong type in a field of transformers, whose own errors would not name it."""
    for name, kind in _TYPES.items():
        value = config.get(name)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if value is not None and wrong:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(x.__name__ for x in kinds)
            raise ValueError(f"{folder}: {name} in config.json must be null or of type {expected}, got {value!r:.80}")


def _check_elements(folder: Path, config: dict[str, Any], elements: int) -> None:
    """Raise a ValueError if the embedding has over 2³⁰ elements and over 16 times those of all weights in the files."""
    sizes = [config.get(name) for name in ("vocab_size", "hidden_size")]
    # the factor 16 covers quantised weights: up to eight elements share one stored element
    if all(isinstance(size, int) for size in sizes) and math.prod(sizes) > max(16 * elements, 2**30):  # type: ignore[arg-type]
        raise ValueError(
            f"{folder}: the weights do not fit config.json: vocab_size={sizes[0]} times hidden_size={sizes[1]} is more "
            f"than all {elements:,} elements of the weights"
        )
