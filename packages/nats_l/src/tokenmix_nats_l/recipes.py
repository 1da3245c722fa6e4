"""Recipes: the paper's models, ablations and baselines, recall for one GPU, and a tiny model for a laptop.

Hybrids have 21 layers: NAtS-L in layers 3, 7, 11, 15, 19 and 20, counted from 0, and Gated DeltaNet in all others,
without rotary positions. The pure model has NAtS-L in all layers, with rotary positions. Tests count their parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmix_core.training import ATTENTION, GDN, Recipe, recall, tiny_setting
from tokenmix_nats_l.baselines import BASELINES, SIZES, baseline, delta_rule

if TYPE_CHECKING:
    from transformers import TrainerCallback

MODEL_TYPE, NATS_L = "tokenmix_nats_l", "nats_l"
LAYERS, HYBRID_LAYERS = 21, (3, 7, 11, 15, 19, 20)
SOFTMAX_HEADS = {"380m": 12, "800m": 18}
EVALUATIONS = ["perplexity-by-position", "chunk-types"]


def steer(recipe: Recipe) -> TrainerCallback:
    """Return the callback that adapts and logs softmax fractions; only this call imports transformers' Trainer."""
    from tokenmix_nats_l.training import steer_shares

    return steer_shares(recipe)


def paper(size: str, *, hybrid: bool = True, **changes: Any) -> Recipe:
    """Return the recipe of NAtS-L Hybrid or pure NAtS-L in a size of the paper; `changes` are options of its layers."""
    base, heads = baseline("gdn", size), delta_rule(size)
    options: dict[str, dict[str, Any]] = {
        NATS_L: {**heads, "num_softmax_heads": SOFTMAX_HEADS[size], "rope": not hybrid} | changes
    }
    mixers = [NATS_L] * LAYERS
    if hybrid:
        mixers = [NATS_L if i in HYBRID_LAYERS else GDN for i in range(LAYERS)]
        options[GDN] = heads
    name = f"nats-l-hybrid-{size}" if hybrid else f"nats-l-{size}"
    return replace(
        base,
        name=name,
        description=f"NAtS-L{' Hybrid' if hybrid else ''} with {size.upper()} parameters, as trained in the paper",
        model={**base.model, "mixers": mixers, "mixer_options": options},
        model_type=MODEL_TYPE,
        callbacks=(steer,),
        run=replace(base.run, evaluations=EVALUATIONS),
    )


# for each row of the paper's Table 4: the options that differ from the hybrid's; ABLATIONS adds rows with larger chunks
TABLE_4: dict[str, dict[str, Any]] = {
    "softmax-own-chunk": {"own_chunk": "softmax"},
    "linear-own-chunk": {"own_chunk": "linear"},
    "no-decay": {"decay": False},
    "norm-of-sum": {"norm": "sum"},
    "no-weights": {"weights": "none"},
    "weights-from-inputs": {"weights": "inputs"},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    **TABLE_4,
    "chunk128": {"chunk": 128},
    "chunk256": {"chunk": 256},
}


def ablation(name: str, size: str = "380m") -> Recipe:
    """Return the recipe of an ablation: the hybrid's recipe with the options that `ABLATIONS` lists."""
    recipe = paper(size, **ABLATIONS[name])
    return replace(recipe, name=f"{recipe.name}-{name}", description=f"ablation of NAtS-L Hybrid: {name}")


RECALL = (
    "nats-l",
    "nats-l-hybrid",
    *(f"nats-l-hybrid-{name}" for name in ABLATIONS),
    "gdn",
    "gdn-hybrid",
    "transformer",
)
_RECALL_SIZES = {
    # one softmax head with all channels of the delta rule's one head, whose values are as wide as its keys
    "small": {"num_heads": 1, "head_dim": 64, "expand_v": 1.0, "num_softmax_heads": 1},
    "100m": {"num_heads": 3, "head_dim": 128, "expand_v": 2.0, "num_softmax_heads": 6},
}


def recall_recipe(kind: str, size: str) -> Recipe:
    """Return a recipe that trains multi-query associative recall from random weights, with core's `recall` settings.

    Hybrids have NAtS-L or attention in one layer of four; small hybrids in one of two.
    """
    if not kind.startswith("nats-l"):
        core = {"gdn-hybrid": "hybrid"}.get(kind, kind)
        return replace(recall(core, size), name=f"recall-{kind}-{size}")
    base = recall("hybrid" if "hybrid" in kind else "gdn", size)
    mixers = [NATS_L if mixer == ATTENTION or "hybrid" not in kind else mixer for mixer in base.model["mixers"]]
    changes = ABLATIONS.get(kind.removeprefix("nats-l-hybrid-"), {})
    options = {NATS_L: {**_RECALL_SIZES[size], "rope": "hybrid" not in kind} | changes}
    options |= {label: value for label, value in base.model["mixer_options"].items() if label in mixers}
    return replace(
        base,
        name=f"recall-{kind}-{size}",
        description=f"multi-query associative recall, {kind}, {size}; minutes on one GPU",
        model={**base.model, "mixers": mixers, "mixer_options": options},
        model_type=MODEL_TYPE,
        callbacks=(steer,),
    )


def tiny() -> Recipe:
    """Return a recipe for two CPU cores: Gated DeltaNet, one layer in four NAtS-L, on Python's standard library."""
    base = tiny_setting()
    mixers = [NATS_L if mixer == ATTENTION else mixer for mixer in base.model["mixers"]]
    options = {
        GDN: base.model["mixer_options"][GDN],
        NATS_L: {"num_heads": 2, "head_dim": 64, "expand_v": 1.0, "num_softmax_heads": 2},
    }
    return replace(
        base,
        description="GDN with one NAtS-L layer in four, on the built-in corpus; minutes on a laptop",
        model={**base.model, "mixers": mixers, "mixer_options": options},
        model_type=MODEL_TYPE,
        callbacks=(steer,),
        run=replace(base.run, evaluations=[*base.run.evaluations, "chunk-types"]),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny,
    **{f"nats-l-hybrid-{size}": partial(paper, size) for size in SIZES},
    **{f"nats-l-{size}": partial(paper, size, hybrid=False) for size in SIZES},
    **{f"nats-l-hybrid-380m-{name}": partial(ablation, name) for name in ABLATIONS},
    **{f"{kind}-{size}": partial(baseline, kind, size) for kind in BASELINES for size in SIZES},
    **{f"recall-{kind}-{size}": partial(recall_recipe, kind, size) for kind in RECALL for size in _RECALL_SIZES},
}
