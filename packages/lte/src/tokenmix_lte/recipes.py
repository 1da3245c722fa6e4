"""Recipes: the paper's models, ablations and baselines, recall for one GPU, and a tiny model for a laptop.

Hybrids have Gated DeltaNet at even layers and LTE at odd layers. As in the paper, all models of one size share width
and depth; they also share the MLP, so that their parameter counts differ by the mixers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmix_core.training import ATTENTION, GDN, Recipe, recall, tiny_setting
from tokenmix_lte.baselines import BASELINES, SIZES, baseline

if TYPE_CHECKING:
    from transformers import TrainerCallback

MODEL_TYPE, LTE, NSA = "tokenmix_lte", "lte", "nsa"
EVALUATIONS = ["perplexity-by-position", "retention"]
# for each ablation, the options that differ from those of laLTE; "no-far" has no scorer and so no λ to adapt
ABLATIONS: dict[str, dict[str, Any]] = {
    "mlp": {"scorer": "mlp"},
    "causal": {"scorer": "causal"},
    "no-far": {"scorer": "none"},
    "inside": {"estimator": "inside"},
}


def steer(recipe: Recipe) -> TrainerCallback:
    """Return the callback that adapts λ; transformers' Trainer is imported only in this call."""
    from tokenmix_lte.training import steer_sparsity

    return steer_sparsity(recipe)


def paper(size: str, *, pure: bool = False, **changes: Any) -> Recipe:
    """Return the recipe of laLTE, or of pure LTE, in a size of the paper; `changes` are options of the LTE layers."""
    base = baseline("gdn-attention", size)
    name = f"lte-{size}" if pure else f"lalte-{size}"
    options = {LTE: SIZES[size][1] | changes}
    if not pure:
        options[GDN] = base.model["mixer_options"][GDN]
    return replace(
        base,
        name=name,
        description=f"{'LTE alone' if pure else 'laLTE'} with {size.upper()} parameters, as trained in the paper",
        model={
            **base.model,
            "mixers": [LTE] if pure else [GDN, LTE] * 12,
            "mixer_options": options,
        },
        model_type=MODEL_TYPE,
        run=replace(base.run, evaluations=EVALUATIONS),
        callbacks=_callbacks(changes),
    )


def ablation(name: str, size: str) -> Recipe:
    """Return the recipe of an ablation of laLTE: another scorer or estimator."""
    recipe = paper(size, **ABLATIONS[name])
    return replace(recipe, name=f"{recipe.name}-{name}", description=f"ablation of laLTE: {name}, {size.upper()}")


def nsa(size: str, *, pure: bool = False) -> Recipe:
    """Return the recipe of laNSA, or of pure NSA, in a size of the paper; both have 32 query heads and 2 key heads."""
    name = f"nsa-{size}" if pure else f"lansa-{size}"
    description = f"{'NSA alone' if pure else 'laNSA'} with {size.upper()} parameters, as trained in the paper"
    return _with_nsa(paper(size, pure=pure), name, description, {"num_heads": 32, "num_kv_heads": 2, "head_dim": 64})


def _with_nsa(recipe: Recipe, name: str, description: str, options: dict[str, Any]) -> Recipe:
    """Return the recipe with NSA layers, which have these `options`, instead of the LTE layers."""
    mixers = [NSA if mixer == LTE else mixer for mixer in recipe.model["mixers"]]
    others = {mixer: x for mixer, x in recipe.model["mixer_options"].items() if mixer != LTE}
    evaluations = [suite for suite in recipe.run.evaluations if suite != "retention"]
    return replace(
        recipe,
        name=name,
        description=description,
        model={**recipe.model, "mixers": mixers, "mixer_options": {**others, NSA: options}},
        run=replace(recipe.run, evaluations=evaluations),
        callbacks=(),
    )


# LTE options of the recall models, by size: a query sees at most window + cap tokens, fewer than those of the key-value
# pairs, which fill the first half of a row
_RECALL = {
    "small": {"num_heads": 2, "window": 64, "cap": 128, "sinks": 4},
    "100m": {"num_heads": 6, "window": 128, "cap": 256, "sinks": 4},
}
# the selected blocks have as many tokens as LTE retains (its cap); in "100m", 8 query heads instead of 6 compensate for
# fewer key heads
_RECALL_NSA = {
    "small": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "block": 16, "blocks": 8, "window": 64},
    "100m": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block": 32, "blocks": 8, "window": 128},
}
RECALL = ("lalte", *(f"lalte-{name}" for name in ABLATIONS), "gdn-swa", "gdn-attention", "gdn", "transformer")


def recall_recipe(kind: str, size: str) -> Recipe:
    """Return a recipe of multi-query associative recall from random weights, with the settings of core's `recall`.

    Hybrids have LTE, windowed attention or full attention at odd layers. In "gdn-swa", the window is LTE's window plus
    half the number of keys that LTE retains (its cap), as in the paper.
    """
    if kind in ("gdn", "transformer"):
        return replace(recall(kind, size), name=f"recall-{kind}-{size}")
    base, options = recall("gdn", size), _RECALL[size]
    changes = ABLATIONS.get(kind.removeprefix("lalte-"), {})
    mixer: dict[str, Any] = {"num_heads": options["num_heads"]}
    other = ATTENTION
    if kind.startswith("lalte"):
        other, mixer = LTE, options | changes
    elif kind == "gdn-swa":
        mixer["window"] = options["window"] + options["cap"] // 2
    return replace(
        base,
        name=f"recall-{kind}-{size}",
        description=f"multi-query associative recall, {kind}, {size}; minutes on one GPU",
        model={
            **base.model,
            "mixers": [GDN, other],
            "mixer_options": {GDN: base.model["mixer_options"][GDN], other: mixer},
        },
        model_type=MODEL_TYPE if other == LTE else base.model_type,
        callbacks=_callbacks(changes) if other == LTE else (),
    )


def recall_nsa(size: str, *, pure: bool = False) -> Recipe:
    """Return the recall recipe of laNSA or pure NSA, whose queries see as many tokens as LTE's: window + cap."""
    kind = NSA if pure else "lansa"
    description = f"multi-query associative recall, {kind}, {size}; minutes on one GPU"
    recipe = _with_nsa(recall_recipe("lalte", size), f"recall-{kind}-{size}", description, _RECALL_NSA[size])
    if not pure:
        return recipe
    model = {**recipe.model, "mixers": [NSA], "mixer_options": {NSA: _RECALL_NSA[size]}}
    return replace(recipe, model=model)


def tiny() -> Recipe:
    """Return a recipe for two CPU cores: Gated DeltaNet with LTE at odd layers, on text of Python's library."""
    base = tiny_setting()
    options = {
        GDN: base.model["mixer_options"][GDN],
        LTE: {"num_heads": 4, "num_kv_heads": 2, "window": 64, "cap": 48, "sinks": 4},
    }
    return replace(
        base,
        description="GDN with LTE at every other layer, on the built-in corpus; minutes on a laptop",
        model={**base.model, "mixers": [GDN, LTE], "mixer_options": options},
        model_type=MODEL_TYPE,
        run=replace(base.run, evaluations=EVALUATIONS),
        callbacks=(steer,),
    )


def tiny_nsa() -> Recipe:
    """Return the recipe `tiny` with NSA instead of LTE at odd layers."""
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block": 16, "blocks": 4, "window": 64}
    description = "GDN with NSA at every other layer, on the built-in corpus; minutes on a laptop"
    return _with_nsa(tiny(), "tiny-nsa", description, options)


def _callbacks(changes: dict[str, Any]) -> tuple:
    return () if changes.get("scorer") == "none" else (steer,)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny,
    "tiny-nsa": tiny_nsa,
    **{f"lalte-{size}": partial(paper, size) for size in SIZES},
    **{f"lte-{size}": partial(paper, size, pure=True) for size in SIZES},
    **{f"lansa-{size}": partial(nsa, size) for size in SIZES},
    **{f"nsa-{size}": partial(nsa, size, pure=True) for size in SIZES},
    **{f"lalte-{size}-{name}": partial(ablation, name, size) for name in ABLATIONS for size in SIZES},
    **{f"{kind}-{size}": partial(baseline, kind, size) for kind in BASELINES for size in SIZES},
    **{f"recall-{kind}-{size}": partial(recall_recipe, kind, size) for kind in RECALL for size in _RECALL},
    **{f"recall-lansa-{size}": partial(recall_nsa, size) for size in _RECALL},
    **{f"recall-nsa-{size}": partial(recall_nsa, size, pure=True) for size in _RECALL},
}
