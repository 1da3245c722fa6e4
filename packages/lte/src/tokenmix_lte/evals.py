"""The paper's evaluation suites: the fraction of keys that heads retain, and the cost of scorers and layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from tokenmix_core.evaluation import (
    BUILT_IN_TEXT,
    LM_EVAL_READS,
    EvalOptions,
    Parts,
    Suite,
    SuiteResult,
    cut_sequences,
    layer_heatmap,
    text_tokens,
)
from tokenmix_lte.latency import latency_suite
from tokenmix_lte.mixer import Lte
from tokenmix_lte.tables import TABLES, commonsense_suite, evaporate_suite


def lte_layers(model: Any) -> dict[int, Lte]:
    """Return the LTE layers of a model by layer index.

    Raises:
        ValueError: the model has no LTE layer.
    """
    mixers: Any = getattr(getattr(model, "model", None), "mixers", ())
    layers: dict[int, Lte] = {i: mixer for i, mixer in enumerate(mixers) if isinstance(mixer, Lte)}
    if not layers:
        raise ValueError(f"the suite needs a model with LTE layers, got {type(model).__name__} without any")
    return layers


@torch.inference_mode()
def retained_shares(
    model: Any, sequences: Int[Tensor, "N T"], *, batch_size: int = 8, progress: bool = True
) -> Float[np.ndarray, "2 layers heads"]:
    """Return the fraction of the tokens before the window that heads retain at the end, with and without the cap.

    The cap limits the tokens that a head retains; without it, these are the sinks and all tokens with positive logits.
    """
    lte_layers(model)
    total: Any = 0
    for batch in tqdm(sequences.split(batch_size), desc="retention", unit="batch", disable=not progress):
        found = model.model(batch.to(model.device), use_cache=False).auxiliary
        shares = torch.stack([found[name] for name in ("held_share", "scored_share")])
        total = total + shares.double().cpu() * len(batch)
    return (total / len(sequences)).numpy()


def retention_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure and plot, for each length, the retained fraction of the tokens before the window (paper, Figure 5)."""
    options.choose("retention", ("retention",))
    layers = lte_layers(model)
    heads = {layer.num_kv_heads for layer in layers.values()}
    if len(heads) > 1:
        raise ValueError(f"retention needs LTE layers with equally many key heads, got {sorted(heads)}")
    widest = max(layer.window for layer in layers.values())
    lengths = sorted(options.lengths or (options.max_length or model.config.max_position_embeddings,))
    count = options.limit or 16
    rows, plots, parts = [], [], Parts()
    for length in lengths:
        with parts.part(f"{length:,} tokens"):
            if length <= widest:
                raise ValueError(f"retention needs lengths above the window of {widest} tokens, got {length}")
            sequences = cut_sequences(text_tokens(options.text, tokenizer, 4 * count * length), length, count)
            of_text = {"batch_size": options.batch_size or 8, "progress": options.progress}
            for kind, shares in zip(("held", "scorer"), retained_shares(model, sequences, **of_text), strict=True):
                for i, share in zip(layers, shares, strict=True):
                    row = {"tokens": length, "sequences": len(sequences), "retained": kind, "layer": i}
                    rows.append(
                        row | {"mean": float(share.mean())} | {f"head {h}": float(x) for h, x in enumerate(share)}
                    )
                by = "under the cap" if kind == "held" else "by the scorer, before the cap"
                title = f"Share of the tokens beyond the window retained {by}, after {length} tokens"
                plots.append(layer_heatmap(title, "key head", layers, shares.tolist()))
    settings = {"text": options.text or BUILT_IN_TEXT}
    return parts.result({"suite": "retention", "settings": settings, "rows": rows, "plots": plots})


def scorer_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Compute the scorers' fractions of the model's parameters, and of its forward FLOPs per token by length."""
    options.choose("scorer", ("scorer",))
    layers = lte_layers(model)
    scorers = [layer.scorer for layer in layers.values() if layer.scorer is not None]
    parameters = sum(p.numel() for scorer in scorers for p in scorer.parameters())
    flops = sum(scorer.flops for scorer in scorers)
    whole = sum(p.numel() for p in model.parameters())
    rows = []
    for length in sorted(options.lengths or (4096,)):
        total = model.flops_per_token(length) / 3
        mixers = sum(layer.flops_per_token(length) for layer in layers.values())
        rows.append(
            {
                "tokens": length,
                "scorers' parameters": parameters,
                "share of parameters": parameters / whole,
                "scorers' operations a token": flops,
                "share of operations": flops / total,
                "share of the layers' operations": flops / mixers,
            }
        )
    return {"suite": "scorer", "settings": {"parameters": whole}, "rows": rows, "plots": []}


SUITES: dict[str, Suite] = {
    "commonsense": Suite(
        "nine zero-shot tasks and WikiText (Table 1), through lm-eval", commonsense_suite, reads=LM_EVAL_READS
    ),
    "evaporate": Suite(
        "recall from passages, prompts of 4K (Table 3), through lm-eval", evaporate_suite, reads=LM_EVAL_READS
    ),
    "latency": Suite(
        "time of layers with a KV cache, prefilling and decoding (Figure 4); offline",
        latency_suite,
        reads=("lengths", "text"),
    ),
    "retention": Suite(
        "retained share of the tokens beyond the window, by layer and head; offline",
        retention_suite,
        reads=("lengths", "max_length", "text"),
    ),
    "scorer": Suite("the scorers' share of parameters and operations; offline", scorer_suite, reads=("lengths",)),
    **TABLES,
}
