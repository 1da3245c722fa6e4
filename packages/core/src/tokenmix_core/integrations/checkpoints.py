"""Convert other libraries' model folders to ours and back: the code that all layouts use.

A layout converts another library's `config.json` to a configuration of ours, and maps the names of weights. This module
reads the weights, and checks that each is present, finite and of the right shape, and that the folder has no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tokenmix_core._utils import trust
from tokenmix_core._utils.atomic_io import check_new_folder
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.modeling.checkpoint import copy_companions, not_finite, some
from tokenmix_core.modeling.folder_checks import INDEX, check_sizes, index_parts
from tokenmix_core.nn.rotary import RotaryEmbedding, rope_frequencies

CONFIG = "config.json"
DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# maps our name of each weight to the other library's name; None if that library lacks the weight, which is then zero
Names = dict[str, str | None]


@dataclass(frozen=True)
class Layout:
    """Another library's format of configuration and weights.

    Attributes:
        what: name of the layout in messages.
        fits: returns whether a configuration has this layout.
        read: converts the other library's configuration to ours; returns it and the names of weights.
        write: converts our configuration to the other library's; returns it and the names of weights. None if the
            layout can only be read.
        ignored: name suffixes of tensors that the other library's files contain and that are not weights of the model.
        reordered: used when reading: takes our name of a weight and the weight; returns it with its rows in our order.
            None if the order is the same.
    """

    what: str
    fits: Callable[[Fields], bool]
    read: Callable[[Fields], tuple[HybridConfig, Names]]
    write: Callable[[HybridConfig], tuple[dict[str, Any], Names]] | None = None
    ignored: tuple[str, ...] = ()
    reordered: Callable[[str, Tensor], Tensor] | None = None


class Fields:
    """A configuration of another library, with methods that check whether our models support its values."""

    def __init__(self, source: Path, values: Mapping[str, Any]) -> None:
        self.source, self.values = source, values

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of `names` that has a value other than None; if none has, return `default`."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the same value as `get`; raise a ValueError unless it is a positive integer."""
        value = self.get(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refused(f"{names[0]} must be a positive number, got {value!r}")
        return value

    def only(self, name: str, *known: Any, why: str) -> None:
        """Raise a ValueError unless the value of `name` is in `known`; without a value, `known[0]` is assumed."""
        value = self.values.get(name, known[0])
        value = tuple(value) if isinstance(value, list) else value
        if value not in known:
            raise self.refused(f"{name}={value!r} cannot be converted: {why}")

    def refused(self, text: str) -> ValueError:
        """Return an error whose message says why the folder is not converted."""
        return ValueError(f"{self.source}: {text}")


def read_fields(source: Path) -> Fields:
    """Read the configuration of a folder.

    Raises:
        ValueError: the configuration is missing or damaged.
    """
    path = source / CONFIG
    if not path.is_file():
        raise ValueError(f"{source} holds no model: expected a folder with {CONFIG} and weights")
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_decode_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a dictionary of fields, and does not")
    check_sizes(values, source)
    return Fields(source, values)


def _decode_float(value: dict[str, Any]) -> Any:
    """Convert transformers' JSON form of an infinite number to a float."""
    return float(value["__float__"]) if set(value) == {"__float__"} else value


def read_weights(source: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder from `model.safetensors` or `pytorch_model.bin`, a single file or numbered parts.

    Raises:
        ValueError: there is no such file, or one is missing, damaged or truncated.
    """
    for name, load in (("model.safetensors", load_file), ("pytorch_model.bin", _load_pickled)):
        index = source / f"{name}{INDEX}"
        if index.is_file():
            files = index_parts(index)
        elif (source / name).is_file():
            files = {"": name}
        else:
            continue
        tensors: dict[str, Tensor] = {}
        for part in sorted(set(files.values())):
            path = source / part
            try:
                tensors |= load(path)
            except Exception as error:
                # any error: unpickling a damaged file can raise errors of all types
                raise ValueError(f"{path} cannot be read, it is damaged or cut short ({error})") from error
        if lost := sorted(set(files) - set(tensors) - {""}):
            raise ValueError(f"{source}: {len(lost)} weights of {index.name} are in no part ({some(lost)})")
        return tensors
    raise ValueError(f"{source} holds no weights: expected model.safetensors or pytorch_model.bin")


def layout_of(fields: Fields, layouts: Sequence[Layout]) -> Layout:
    """Return the layout of a folder.

    Raises:
        ValueError: the configuration has none of the given layouts.
    """
    found = next((layout for layout in layouts if layout.fits(fields)), None)
    if found is None:
        kind, known = fields.get("model_type"), "; ".join(layout.what for layout in layouts)
        raise fields.refused(f"model_type {kind!r} is of no layout that is read here, which are: {known}")
    return found


def _load_pickled(path: Path) -> dict[str, Tensor]:
    import pickle

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError("it holds more than tensors, or something else") from error
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise ValueError("it holds no dictionary of tensors")
    return tensors


def load_third_party(source: Path, layouts: Sequence[Layout], dtype: str = "auto") -> Any:
    """Load another library's model folder as one of our models, in evaluation mode.

    Args:
        source: the folder.
        layouts: the layouts that the folder may have.
        dtype: "auto" for the dtype of the folder's embedding, or a name in `DTYPES`. Parameters that mixers hold in
            float32, such as decay rates, stay float32 (`nn.KeepsFloat32`).

    Raises:
        ValueError: an unknown dtype or layout, a field that our models do not support, or weights that are quantised,
            damaged, missing, unknown, misshapen or not finite.
    """
    check_dtype(dtype)
    fields = read_fields(source)
    if (quantized := fields.get("quantization_config")) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise fields.refused(f"quantization_config={method!r} cannot be converted: its weights are quantized")
    layout = layout_of(fields, layouts)
    config, names = layout.read(fields)
    weights = {n: x for n, x in read_weights(source).items() if not n.endswith(layout.ignored or ("\0",))}
    with torch.device("meta"):
        # build the model class that is registered for the configuration
        model: Any = trust.from_config(AutoModelForCausalLM, config)
    state = _ours(source, layout, names, weights, dict(model.state_dict()), tied=config.tie_word_embeddings)
    wide: set[str] = model.model._keep_in_fp32_modules_strict or set()  # pyright: ignore[reportAssignmentType]
    chosen = state["model.embed_tokens.weight"].dtype if dtype == "auto" else getattr(torch, dtype)
    kept = {f"model.{name}" for name in wide}
    state = {n: x.to(torch.promote_types(chosen, torch.float32) if n in kept else chosen) for n, x in state.items()}
    if layout.reordered is not None:
        state = {name: layout.reordered(name, x) for name, x in state.items()}
    model.load_state_dict(state, strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    for table in model.modules():
        if isinstance(table, RotaryEmbedding):
            # compute these buffers, which checkpoints do not contain
            table.inv_freq = rope_frequencies(*table.args)[0]
    if bad := not_finite(model):
        raise ValueError(f"{source}: weights are not finite: NaN or infinity in {len(bad)} tensors ({some(bad)})")
    return model.eval()


def _ours(
    source: Path, layout: Layout, names: Names, weights: dict[str, Tensor], wanted: dict[str, Tensor], *, tied: bool
) -> dict[str, Tensor]:
    """Return the folder's weights under our names and in our shapes; if `tied`, without the output layer's.

    A weight whose other name is None, because the layout has none, is zero.
    """
    if tied:
        head = weights.pop(names.pop("lm_head.weight") or "", None)
        embedding = weights.get(names["model.embed_tokens.weight"] or "")
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise ValueError(f"{source}: word embeddings are said to be tied, and lm_head.weight differs from them")
    if others := [f"{n} {str(x.dtype).removeprefix('torch.')}" for n, x in weights.items() if x.dtype not in _FLOATS]:
        raise ValueError(f"{source}: weights are not floating-point numbers: {len(others)} tensors ({some(others)})")
    asked = {theirs for theirs in names.values() if theirs is not None}
    problems = {"missing": sorted(asked - set(weights)), "unknown": sorted(set(weights) - asked)}
    found: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        shape = wanted[ours].shape
        if theirs is None:
            found[ours] = torch.zeros(shape)
        elif theirs in weights:
            x = weights[theirs]
            # accept a convolution's weight with an extra dimension of size 1
            if [n for n in x.shape if n > 1] != [n for n in shape if n > 1]:
                problems.setdefault("misshapen", []).append(f"{theirs} {list(x.shape)} for {list(shape)}")
            else:
                found[ours] = x.reshape(shape).contiguous()
    if text := "; ".join(f"{len(these)} {kind} ({some(these)})" for kind, these in problems.items() if these):
        raise ValueError(f"{source}: the weights are not those of {layout.what} with this configuration: {text}")
    return found


def convert_folder(source: Path, out: Path, layouts: Sequence[Layout], *, dtype: str = "auto") -> Any:
    """Convert another library's folder to ours, and return the model.

    Args:
        source: the folder to read.
        out: the folder to create.
        layouts, dtype: the same as for `load_third_party`.

    Raises:
        ValueError: the reasons given at `load_third_party`, or `out` is not empty.
    """
    check_new_folder(out)
    model = load_third_party(source, layouts, dtype)
    model.save_pretrained(out)
    copy_companions(source, out)
    return model


def load_ours(source: Path, dtype: str = "auto") -> Any:
    """Load the model of a folder that this library has written, to export it to another layout.

    Raises:
        ValueError: a model type of another library, or a damaged folder.
    """
    check_dtype(dtype)
    kind = read_fields(source).get("model_type")
    if kind != HybridConfig.model_type:
        raise ValueError(f"{source}: expected a model of type {HybridConfig.model_type!r}, got {kind!r}")
    return HybridForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)


def check_dtype(dtype: str) -> None:
    """Raise a ValueError for an unknown dtype name."""
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"--dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")


def export(model: Any, layout: Layout, out: Path) -> None:
    """Write one of our models in another library's layout.

    Raises:
        ValueError: the other library has no equivalent model, or `out` is not empty.
    """
    check_new_folder(out)
    assert layout.write is not None
    values, names = layout.write(model.config)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    tensors = {}
    for ours, theirs in names.items():
        assert theirs is not None
        x = state[ours].detach().contiguous()
        tensors[theirs] = x.unsqueeze(1) if theirs.endswith("conv1d.weight") else x
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    values |= {"dtype": str(model.dtype).removeprefix("torch.")}
    (out / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
