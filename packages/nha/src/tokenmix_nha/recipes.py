"""Recipes: the paper's models, ablations and baselines, recall models for one GPU, and a tiny model for a laptop.

Some choices are not stated in the paper. Here heads have 128 channels and log-gates are divided by 8. MLPs are smaller
by the number of gate weights, so that NHA and its baselines have equally many parameters (a test counts them). An
ablation changes a single option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmix_core.training import (
    ATTENTION,
    BYTE_VOCAB,
    GDN,
    OptimizerRecipe,
    Recipe,
    Tokens,
    tiny_setting,
)
from tokenmix_core.training import recall as core_recall
from tokenmix_nha.baselines import BASELINES, SIZES, baseline
from tokenmix_nha.windows import FULL, Window, hybrid_windows, nha_layers

if TYPE_CHECKING:
    from transformers import TrainerCallback

MODEL_TYPE = "tokenmix_nha"
# inner width of the MLP, by size, in models with gates
_MLPS = {"340m": 2624, "1.3b": 5312}
# window sizes that training draws at random
RANDOM_WINDOWS: list[Window] = [0, 32, FULL]


def draw(recipe: Recipe) -> TrainerCallback:
    """Return the callback that draws windows in training, from `random_windows` of the recipe's configuration."""
    from tokenmix_nha.training import DrawWindows

    config: Any = recipe.model_config()
    return DrawWindows(config.random_windows, recipe.data.data_seed)


def one_in_eight(layers: int, window: Window, full_layer: int) -> list[Window]:
    """Return one window per layer: "full" at index `full_layer` of every eight layers, else `window`."""
    return hybrid_windows(layers, window, range(full_layer, layers, 8))


def paper(size: str, windows: Window | list[Window] | None = None, **changes: Any) -> Recipe:
    """Return the recipe of NHA in a size of the paper: 64 slots, windows of 32, one full-attention layer in eight.

    All other settings are those of the baselines. `windows` and `changes` replace windows and options of all layers.
    """
    base = baseline("transformer", size)
    width, layers, full_layer = SIZES[size]
    windows = one_in_eight(layers, 32, full_layer) if windows is None else windows
    return replace(
        base,
        name=f"nha-{size}",
        description=f"NHA with {size.upper()} parameters, as trained in the paper",
        model={
            **{name: base.model[name] for name in ("vocab_size", "tie_word_embeddings", "max_position_embeddings")},
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": _MLPS[size],
            **nha_layers(windows, **{"num_heads": width // 128, "slots": 64} | changes),
        },
        model_type=MODEL_TYPE,
        run=replace(base.run, evaluations=["perplexity-by-position", "slot-share"]),
    )


def drawn(recipe: Recipe, windows: list[Window] = RANDOM_WINDOWS) -> Recipe:
    """Return the recipe with a window drawn for every layer and step (paper, Figure 4); its models suit `search`."""
    return replace(
        recipe,
        name=f"{recipe.name}-random",
        description=f"{recipe.description}; windows drawn for every layer and step",
        model={**recipe.model, "random_windows": windows},
        callbacks=(*recipe.callbacks, draw),
    )


def gsa(size: str, *, hybrid: bool = False) -> Recipe:
    """Return the recipe of gated slot attention, a baseline of the paper's Table 1: NHA with windows of 0.

    With `hybrid`, one layer in every eight has full attention.
    """
    _, layers, full_layer = SIZES[size]
    text = f"gated slot attention{' with full layers' if hybrid else ''}, {size.upper()} parameters"
    windows = one_in_eight(layers, 0, full_layer) if hybrid else 0
    return replace(paper(size, windows), name=f"gsa-{'hybrid-' if hybrid else ''}{size}", description=text)


# the rows of the paper's Tables 6 to 8, as changes of the layers' options in the model of Table 1
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-slots": {"slots": 0},
    "no-shift": {"token_shift": False},
    "fixed-sum": {"fusion": "fixed"},
    "learned-sum": {"fusion": "learned"},
    **{f"slots{m}-window{w}": {"slots": m, "window": w} for m, w in ((64, 8), (64, 16), (32, 32), (64, 64))},
    "rope-both": {"positions": "both"},
    "no-positions": {"positions": "none"},
    "learned-positions": {"positions": "learned"},
    "no-window": {"window": 0},
}
# fractions by which models have more parameters than NHA (negative: fewer), since, as in the paper, an ablation changes
# only the options above
UNMATCHED: dict[str, dict[str, float]] = {
    "no-slots": {"340m": -0.037, "100m": -0.041, "small": -0.059},
    "slots32-window32": {"340m": -0.019, "100m": -0.021, "small": -0.029},
    "learned-positions": {"340m": 0.296, "100m": 0.055, "small": 0.470},
    # Zoology's models have no MLP whose width could compensate for the difference in parameters
    "gdn": {"small": 0.073},
    "transformer": {"small": -0.059},
}


def _difference(name: str, size: str) -> str:
    """Return a phrase that says by how much a recipe's parameter count differs from NHA's; empty if it does not."""
    share = UNMATCHED.get(name, {}).get(size)
    return "" if share is None else f", {abs(share):.1%} {'more' if share > 0 else 'fewer'} parameters than NHA"


def ablation(name: str, size: str = "340m") -> Recipe:
    """Return the recipe of a row of the paper's Tables 6 to 8; layers with a full window keep that window."""
    changes = dict(ABLATIONS[name])
    _, layers, full_layer = SIZES[size]
    windows = one_in_eight(layers, changes.pop("window", 32), full_layer)
    text = f"ablation of NHA: {name}{_difference(name, size)}"
    return replace(paper(size, windows, **changes), name=f"nha-{size}-{name}", description=text)


# the kinds of recall models by name: changed options of NHA, or another mixer
_ABLATED = {"nha": {}} | {f"nha-{name}": changes for name, changes in ABLATIONS.items()}
_NHA_KINDS: dict[str, dict[str, Any]] = {**_ABLATED, "gsa": {"window": 0}}
_CORE_KINDS = {"transformer": ATTENTION, "gdn": GDN}
RECALL = {
    "100m": (*_ABLATED, "nha-pure", "gsa-hybrid", "gsa", "gdn-hybrid", "gdn", "transformer"),
    "small": (*_ABLATED, "gdn", "transformer"),
}
# by size: width, layers, heads of 128 channels, inner width of the MLP without and with gates
_RECALL_SIZES = {"small": (128, 2, 1, 0, 0), "100m": (768, 12, 6, 2048, 1920)}


def recall(kind: str, size: str) -> Recipe:
    """Return the recipe of multi-query associative recall from random weights, which takes minutes on one GPU.

    The "100m" models have the shape of language models. The seventh of their twelve layers has full attention, except
    in "-pure", "gsa" and "gdn" models, where no layer has; in "transformer" models all layers have it. The "small"
    models are those of Zoology: two layers without MLP, which can only mix along time, and without full attention
    except in "transformer". NHA's slots have as many elements as GDN's state; its window comes in addition.
    """
    width, layers, heads, mlp, mlp_beside_gates = _RECALL_SIZES[size]
    setting, length, small = core_recall("gdn", size), 256, size == "small"
    base = kind.removesuffix("-hybrid").removesuffix("-pure")
    full_layers = () if small or kind.endswith("-pure") or kind in ("gsa", "gdn") else (6,)
    model: dict[str, Any] = {
        "vocab_size": setting.data.mqar_vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "max_position_embeddings": length,
    }
    if base in _NHA_KINDS:
        changes = {"num_heads": heads, "slots": 64, "window": 32} | _NHA_KINDS[base]
        windows = hybrid_windows(layers, changes.pop("window"), full_layers)
        model |= {"intermediate_size": mlp_beside_gates, **nha_layers(windows, **changes)}
    else:
        mixers = [ATTENTION if i in full_layers else _CORE_KINDS[base] for i in range(layers)]
        options = {ATTENTION: {"num_heads": heads}, GDN: {"num_heads": heads, "head_dim": 128, "expand_v": 1.0}}
        if not small:
            options = {ATTENTION: {"num_heads": 12}, GDN: {"num_heads": 3, "head_dim": 128, "expand_v": 2.0}}
        model |= {"intermediate_size": mlp, "mixers": mixers}
        model["mixer_options"] = {label: options[label] for label in dict.fromkeys(mixers)}
    difference = _difference(kind.removeprefix("nha-"), size)
    steps, rate = (1000, 3e-3) if small else (1800, 5e-4)
    return replace(
        setting,
        name=f"recall-{kind}-{size}",
        description=f"multi-query associative recall, {kind}, {size}{difference}; minutes on one GPU",
        model=model,
        model_type=MODEL_TYPE if base in _NHA_KINDS else "tokenmix_hybrid",
        data=replace(setting.data, seq_len=length, mqar_pairs=64, data_seed=42),
        optimizer=OptimizerRecipe.in_steps(steps, 100, 2**13, learning_rate=rate, min_learning_rate=rate / 10),
        run=replace(
            setting.run,
            seed=42,
            dataloader_num_workers=2,
            save_steps=10_000,
            evaluation_lengths=[length],
            evaluation_limit=128,
        ),
    )


def tiny() -> Recipe:
    """Return a recipe for laptops: four layers, the third with full attention, trained on Python's standard library."""
    base = tiny_setting()
    return replace(
        base,
        description="NHA with one full layer in four, on the built-in corpus; minutes on a laptop",
        model={
            "vocab_size": BYTE_VOCAB,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "intermediate_size": 384,
            **nha_layers([16, 16, FULL, 16], num_heads=2, slots=16),
            "max_position_embeddings": 256,
        },
        model_type=MODEL_TYPE,
        data=replace(base.data, data_seed=42),
        optimizer=replace(base.optimizer, total_tokens=Tokens(2**11 * 300), warmup_tokens=Tokens(2**11 * 30)),
        run=replace(base.run, seed=42, save_steps=100, evaluations=["perplexity-by-position", "slot-share"]),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny,
    "tiny-random": lambda: drawn(tiny(), [0, 16, FULL]),
    **{f"nha-{size}": partial(paper, size) for size in SIZES},
    **{f"nha-{size}-random": lambda size=size: drawn(paper(size)) for size in SIZES},
    **{f"{kind}-{size}": partial(baseline, kind, size) for size in SIZES for kind in BASELINES},
    **{f"gsa-{size}": partial(gsa, size) for size in SIZES},
    **{f"gsa-hybrid-{size}": partial(gsa, size, hybrid=True) for size in SIZES},
    **{f"nha-340m-{name}": partial(ablation, name) for name in ABLATIONS},
    **{f"recall-{kind}-{size}": partial(recall, kind, size) for size, kinds in RECALL.items() for kind in kinds},
    # leave out windows of 0, since recall is hard to learn with them
    "recall-nha-100m-random": lambda: drawn(recall("nha", "100m"), [32, FULL]),
}
