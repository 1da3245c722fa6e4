"""Recipes: the paper's models, ablations and baselines, a demonstration for one GPU, and a tiny model for a laptop.

As in the paper, a size counts the weights that one mode uses: 13 D² per layer, 5 D² of them in the mixer. The query
projection of the other mode adds D². The baselines are those of core with the same sizes; the paper trains them at half
the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from tokenmix_core.training import (
    ATTENTION,
    BASELINES,
    BYTE_VOCAB,
    SIZES,
    DataRecipe,
    OptimizerRecipe,
    Recipe,
    RowInputs,
    RunRecipe,
    Tokens,
    baseline,
    tiny_setting,
)
from tokenmix_oryx.modes import draw_modes
from tokenmix_oryx.options import GDN, MAMBA2

FAMILIES = {"tm": MAMBA2, "tg": GDN}
WIDTHS = {size: (sizes.width, sizes.layers) for size, sizes in SIZES.items()}
# millions of parameters that one mode uses, by size; models are trained on 20 tokens per parameter
_MILLIONS = {"130m": 130, "380m": 380, "810m": 810, "1.4b": 1400}


def mode_rows(recipe: Recipe) -> RowInputs:
    """Return a function of a row's index that returns the row's modes; they depend on the index and the data's seed."""
    config = recipe.model_config()
    return partial(
        _modes_of_row,
        recipe.data.seq_len,
        recipe.data.data_seed,
        config.mode_chunk_size,
        config.attention_probability,
        config.mode_assignment,
    )


def _modes_of_row(seq_len: int, seed: int, chunk_size: int, probability: float, assignment: Any, index: int):
    modes: Tensor = draw_modes(
        seq_len,
        seed=seed,
        index=index,
        chunk_size=chunk_size,
        attention_probability=probability,
        assignment=assignment,
    )
    return {"mode": modes}


def model_fields(family: str, width: int, layers: int, **options: Any) -> dict[str, Any]:
    """Return the configuration fields of a model; its MLP has 8 D² weights per layer, or 9 D² without output gate."""
    ratio = 8 if options.get("output_gate", True) else 9
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        # an MLP of width F has 3 D F weights in a model of width D; F is rounded to a multiple of 64
        "intermediate_size": round(ratio * width / 3 / 64) * 64,
        "mixers": ["oryx"],
        "mixer_options": {"oryx": {"linear_mixer": FAMILIES[family], **options}},
    }


def paper(family: str, size: str) -> Recipe:
    """Return the recipe of ORYX-TM or ORYX-TG in a size of the paper, with twice the baselines' learning rate."""
    base = baseline("transformer", size)
    shared = {name: base.model[name] for name in ("vocab_size", "tie_word_embeddings", "max_position_embeddings")}
    peak = 2 * base.optimizer.learning_rate
    return replace(
        base,
        name=f"{family}-{size}",
        description=f"ORYX-{family.upper()} with {size.upper()} parameters in each mode, as trained in the paper",
        model=shared | model_fields(family, *WIDTHS[size]),
        model_type="tokenmix_oryx",
        optimizer=replace(base.optimizer, learning_rate=peak, min_learning_rate=peak / 10),
        run=replace(base.run, evaluations=["switch-perplexity"]),
        row_inputs=mode_rows,
    )


# the additions to the baseline's attention in each row of the left half of the paper's Table 5
COMPONENTS: dict[str, dict[str, Any]] = {
    "norm": {},
    "norm-conv-gate": {"conv_size": 4, "output_gate": True},
}


def components(name: str) -> Recipe:
    """Return the recipe of a 1.4B Transformer with the changes to attention that `name` lists (paper, Table 5)."""
    base, parts = baseline("transformer", "1.4b"), COMPONENTS[name]
    options = {"type": "normed_attention", **base.model["mixer_options"][ATTENTION], **parts}
    width, gate = base.model["hidden_size"], bool(parts.get("output_gate"))
    mlp = model_fields("tm", width, 0)["intermediate_size"] if gate else base.model["intermediate_size"]
    return replace(
        base,
        name=f"transformer-1.4b-{name}",
        description=f"Transformer with 1.4B parameters and {name.replace('-', ', ')} (Table 5, left)",
        model={**base.model, "intermediate_size": mlp, "mixer_options": {ATTENTION: options}},
    )


_PLAIN = {"conv_size": 0, "output_gate": False}
# options by which each row of Tables 4 to 8 differs from the family's final model. The paper does not name the base
# model to which a table's rows add one change; it was identified by its perplexities
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "tm": {
        "sequence": {},
        "chunk": {"mode_assignment": "chunk"},
        # left half of Table 4: its base, with perplexities 15.93 and 15.82, is the model of the right half without
        # convolution and gate (15.91, 15.78)
        "shared-query": {**_PLAIN, "shared_query": True},
        "grouped-norm": {**_PLAIN, "grouped_norm": True},
        "shared-query-grouped-norm": {**_PLAIN, "shared_query": True, "grouped_norm": True},
        "no-conv": {"conv_size": 0},
        "no-gate": {"output_gate": False},
        "no-conv-no-gate": _PLAIN,
        # the models of Table 6 have no gate: with RoPE in both modes, perplexities are 15.54 and 15.85 there, but 15.09
        # with a gate (and 16.67 without convolution)
        "rope-attention": {"output_gate": False, "rope": "attention"},
        "no-conv-rope-attention": {**_PLAIN, "rope": "attention"},
    },
    "tg": {
        "sequence": {},
        # Table 7: its base, with perplexities 15.08 and 15.06, is the model of Table 8 with RoPE in both modes
        "l2-key": {"rope": "both", "attention_l2_norm": "key"},
        "l2-query-key": {"rope": "both", "attention_l2_norm": "query_key"},
        "rope-both": {"rope": "both"},
        "kv-identity": {"kv_activation": "none"},
        "rope-both-kv-identity": {"rope": "both", "kv_activation": "none"},
        "linear-query-identity": {"linear_query_activation": "none"},
        "attention-query-identity": {"attention_query_activation": "none"},
        "queries-identity": {"attention_query_activation": "none", "linear_query_activation": "none"},
    },
}


def ablation(family: str, name: str, size: str = "380m") -> Recipe:
    """Return the recipe of a row (paper, Tables 4 to 8) or curve (Figures 4 and 5), with 20 tokens per parameter.

    Each sequence has one mode; if the name contains "chunk", each chunk has one. Models without a gate have a wider
    MLP, so that all models of a size have equally many parameters per mode.
    """
    changes = {"mode_assignment": "sequence", **ABLATIONS[family][name]}
    base, tokens = paper(family, size), 20 * _MILLIONS[size] * 10**6
    assignment = changes.pop("mode_assignment")
    fields = model_fields(family, *WIDTHS[size], **changes)
    return replace(
        base,
        name=f"{family}-{size}-{name}",
        description=f"ablation of ORYX-{family.upper()} at {size.upper()}: {name}",
        model={**base.model, **fields, "mode_assignment": assignment},
        optimizer=replace(base.optimizer, total_tokens=Tokens(tokens), warmup_tokens=Tokens(tokens // 10)),
    )


def demo(family: str, assignment: str) -> Recipe:
    """Return a recipe of about 100M parameters on the built-in corpus and associative recall, for minutes on one GPU.

    Recall needs many steps rather than many tokens, so batches are small, and four of five rows are recall. Rows
    have more pairs than the linear state of either family can store.
    """
    suffix = "" if assignment == "chunk" else "-sequence"
    tokens, vocab = 1024, 1024
    return Recipe(
        name=f"demo-{family}{suffix}",
        description=f"ORYX-{family.upper()}, 100M, {assignment} assignment, corpus and recall; minutes on one GPU",
        model={
            "vocab_size": vocab,
            **model_fields(family, 1024, 7),
            "mode_assignment": assignment,
            "max_position_embeddings": tokens,
            "initializer_range": 0.006,
        },
        model_type="tokenmix_oryx",
        data=DataRecipe(
            sources=["stdlib", "mqar"],
            weights=[0.2, 0.8],
            seq_len=tokens,
            mqar_pairs=tokens // 4,
            mqar_vocab_size=vocab,
            mqar_ramp=0.7,
        ),
        optimizer=OptimizerRecipe.in_steps(1200, 100, 8 * tokens, learning_rate=1e-3, min_learning_rate=1e-4),
        run=RunRecipe(
            dataloader_num_workers=8,
            save_steps=10_000,
            save_total_limit=1,
            logging_steps=50,
            evaluations=["switch-perplexity", "cross-mode-mqar"],
            evaluation_lengths=[tokens],
            evaluation_limit=128,
        ),
        row_inputs=mode_rows,
    )


def tiny(family: str = "tm") -> Recipe:
    """Return a recipe for laptops: four layers of two heads on Python's standard library, with core's tiny setting."""
    base = tiny_setting()
    fields = {**model_fields(family, 128, 4, head_dim=64), "mode_chunk_size": 32}
    return replace(
        base,
        name="tiny" if family == "tm" else f"tiny-{family}",
        description=f"ORYX-{family.upper()} on the built-in corpus; minutes on a laptop",
        model={**fields, "vocab_size": BYTE_VOCAB, "max_position_embeddings": 256},
        model_type="tokenmix_oryx",
        optimizer=replace(base.optimizer, total_tokens=Tokens(2**11 * 500), warmup_tokens=Tokens(2**11 * 50)),
        run=replace(base.run, evaluations=["switch-perplexity"], evaluation_lengths=[256], evaluation_limit=128),
        row_inputs=mode_rows,
    )


def recall() -> Recipe:
    """Return a recipe for a CPU: associative recall with more pairs than a small linear state can store."""
    base = tiny()
    return replace(
        base,
        name="recall",
        description="ORYX-TM on associative recall, 16 pairs in 96 tokens; some minutes on a laptop",
        model={
            **base.model,
            **model_fields("tm", 64, 2, head_dim=16),
            "intermediate_size": 0,
            "mode_chunk_size": 16,
            "attention_probability": 0.5,
        },
        data=DataRecipe(sources=["mqar"], seq_len=96, documents="joined", mqar_pairs=16, mqar_vocab_size=256),
        optimizer=OptimizerRecipe.in_steps(
            2000, 100, 6144, learning_rate=3e-3, min_learning_rate=2e-4, adam_beta2=0.98
        ),
        run=replace(
            base.run,
            logging_steps=50,
            save_steps=500,
            evaluations=["cross-mode-mqar"],
            evaluation_lengths=[96],
            sample_prompt="",
        ),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny,
    "recall": recall,
    "tiny-tg": partial(tiny, "tg"),
    **{
        f"demo-{family}{suffix}": partial(demo, family, assignment)
        for family in FAMILIES
        for suffix, assignment in (("", "chunk"), ("-sequence", "sequence"))
    },
    **{f"{family}-{size}": partial(paper, family, size) for size in WIDTHS for family in FAMILIES},
    **{f"{kind}-{size}": partial(baseline, kind, size) for size in WIDTHS for kind in BASELINES},
    **{f"transformer-1.4b-{name}": partial(components, name) for name in COMPONENTS},
    **{f"{family}-380m-{name}": partial(ablation, family, name) for family in FAMILIES for name in ABLATIONS[family]},
    # the curves of the paper's Figures 4 and 5
    **{
        f"tm-{size}-{name}": partial(ablation, "tm", name, size)
        for size in WIDTHS
        for name in ("sequence", "chunk")
        if size != "380m"
    },
}
