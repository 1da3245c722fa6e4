"""The paper's measurements of NAtS-L layers: fraction of softmax chunks by layer and head, and cache size by length."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from tokenmix_core.data import META
from tokenmix_core.evaluation import (
    BUILT_IN_TEXT,
    EvalOptions,
    Parts,
    Plot,
    Series,
    Suite,
    SuiteResult,
    cut_sequences,
    layer_heatmap,
    text_tokens,
)
from tokenmix_nats_l.mixer import NatsL


def nats_l_layers(model: Any) -> dict[int, NatsL]:
    """Return the NAtS-L layers of a model by their index.

    Raises:
        ValueError: a model without such layers.
    """
    layers = {i: mixer for i, mixer in enumerate(model.model.mixers) if isinstance(mixer, NatsL)}
    if not layers:
        raise ValueError(f"the model has no NAtS-L layer; its mixers are {', '.join(sorted(set(model.config.labels)))}")
    return layers


@contextmanager
def using_types(model: Any, args: argparse.Namespace) -> Iterator[None]:
    """Context manager: all NAtS-L layers have the chunk types `args.types`, unless None; results name these types.

    Raises:
        ValueError: invalid types, or "learned" for layers that have no scores.
    """
    if args.types is None:
        yield
        return
    layers = list(nats_l_layers(model).values())
    saved = [layer.types for layer in layers]
    try:
        for layer in layers:
            layer.types = args.types
        model.evaluation_settings = lambda: {"types": args.types}
        yield
    finally:
        vars(model).pop("evaluation_settings", None)
        for layer, types in zip(layers, saved, strict=True):
            layer.types = types


@torch.inference_mode()
def softmax_shares(
    model: Any, sequences: Int[Tensor, "N T"], *, batch_size: int = 8, progress: bool = True
) -> Float[np.ndarray, "layers heads"]:
    """Return the fraction of softmax chunks for each NAtS-L layer and each head of its delta rule."""
    total, layers = None, nats_l_layers(model)
    for batch in tqdm(sequences.split(batch_size), desc="chunk types", unit="batch", disable=not progress):
        shares = model.model(batch.to(model.device), use_cache=False).auxiliary["softmax_share"].double().cpu()
        total = shares * len(batch) if total is None else total + shares * len(batch)
    assert total is not None
    assert len(total) == len(layers)
    return (total / len(sequences)).numpy()


def chunk_types_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure the fraction of softmax chunks by layer and head (paper, Figures 5, 8), on a text or a folder's files."""
    options.choose("chunk-types", ("chunk-types",))
    found = nats_l_layers(model)
    if len(heads := {layer.num_heads for layer in found.values()}) > 1:
        raise ValueError(f"chunk-types needs NAtS-L layers with equally many heads, got {sorted(heads)}")
    layers = list(found)
    lengths, limit = sorted(options.lengths or (options.max_length or 2048,)), options.limit or 32
    rows, plots, parts = [], [], Parts()
    for (name, source), length in itertools.product(_texts(options.text).items(), lengths):
        with parts.part(f"{name} at {length:,} tokens"):
            sequences = cut_sequences(text_tokens(source, tokenizer, 4 * limit * length), length, limit)
            shares = softmax_shares(model, sequences, batch_size=options.batch_size or 8, progress=options.progress)
            for layer, heads in zip(layers, shares, strict=True):
                row = {"text": name, "tokens": length, "sequences": len(sequences), "layer": layer}
                row["mean"] = float(heads.mean())
                rows.append(row | {f"head {h}": float(share) for h, share in enumerate(heads)})
            title = f"Share of softmax chunks, {name}, {length} tokens"
            plots.append(layer_heatmap(title, "head", layers, shares.tolist()))
    settings = {"text": options.text or BUILT_IN_TEXT}
    return parts.result({"suite": "chunk-types", "settings": settings, "rows": rows, "plots": plots})


def _texts(source: str | None) -> dict[str, str | None]:
    """Return the texts to measure, by name: the files of a folder (unless it is a token file), or only `source`."""
    folder = None if source is None else Path(source)
    if folder is None or not folder.is_dir() or (folder / META).is_file():
        return {source or BUILT_IN_TEXT: source}
    # treat an empty folder like a text: its reader then raises the error
    return {path.name: str(path) for path in sorted(folder.iterdir()) if path.is_file()} or {str(folder): source}


@torch.inference_mode()
def held_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure, after each text length, the cache's bytes, allocated and in use, and each head's retained tokens."""
    options.choose("held", ("held",))
    layers = nats_l_layers(model)
    lengths = sorted(options.lengths or (1024, 2048, 4096))
    tokens = text_tokens(options.text, tokenizer, lengths[-1])
    if len(tokens) < lengths[-1]:
        raise ValueError(f"a text of {len(tokens)} tokens is too short for a context of {lengths[-1]}")
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).unsqueeze(0).to(model.device)
    cache, rows, start, parts = model.make_cache(), [], 0, Parts()
    for length in tqdm(lengths, desc="held", unit="length", disable=not options.progress):
        with parts.part(f"{length:,} tokens"):
            if parts.failed:
                raise ValueError("the cache is incomplete, as a shorter context failed")
            for part in ids[:, start:length].split(2048, 1):
                model.model(part, cache=cache, use_cache=True)
            start = length
            least, most = model.state_bounds(length, 1)
            sizes = {"bytes": cache.allocated_nbytes, "bytes in use": cache.nbytes}
            rows.append({"tokens": length, "layer": "all", **sizes, "least": least, "most": most})
            for i, layer in layers.items():
                held = layer.held_tokens(cache.layers[i])
                heads = [0] * layer.num_softmax_heads if held is None else held[0].tolist()
                stored = cache.layers[i].parts.values()
                row = {
                    "tokens": length,
                    "layer": str(i),
                    "bytes": sum(p.allocated for p in stored),
                    "bytes in use": sum(p.held(length) for p in stored),
                }
                rows.append(row | {f"head {h}": n for h, n in enumerate(heads)})
    whole = [row for row in rows if row["layer"] == "all"]
    series: Series = {
        name: ([float(row["tokens"]) for row in whole], [float(row[name]) for row in whole])
        for name in ("bytes", "bytes in use", "least", "most")
    }
    plot: Plot = {
        "title": "Cache size by length",
        "x": "tokens",
        "y": "bytes",
        "log_x": True,
        "log_y": True,
        "series": series,
    }
    settings = {"text": options.text or BUILT_IN_TEXT}
    return parts.result({"suite": "held", "settings": settings, "rows": rows, "plots": [plot]})


SUITES: dict[str, Suite] = {
    "chunk-types": Suite(
        "share of softmax chunks by layer and head; offline",
        chunk_types_suite,
        reads=("lengths", "max_length", "text"),
    ),
    "held": Suite(
        "cache bytes (allocated, in use) and tokens by context length, layer and head; offline",
        held_suite,
        reads=("lengths", "text"),
    ),
}
