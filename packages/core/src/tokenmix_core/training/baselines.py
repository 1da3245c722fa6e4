"""Recipes of the baselines: tiny models for a laptop, recall on one GPU, language models of 130M to 1.4B parameters.

The papers' packages also build their recipes from `language_model`, `model_fields` and `corpus`. If a paper does not
state a value, the recipe has the usual one: documents joined in a row, β = (0.9, 0.95), weight decay 0.1, clipping at
norm 1, and a cosine schedule that ends at a tenth of the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens

GDN, ATTENTION, MAMBA2 = "gated_delta_net", "attention", "mamba2"
# size of the vocabulary: 256 bytes and three special tokens, rounded up to a multiple of 8 for GEMMs
BYTE_VOCAB = 264
GPT2, LLAMA2 = "gpt2", "fla-hub/transformer-1.3B-100B"
GPT2_VOCAB, LLAMA2_VOCAB = 50257, 32000


def tiny() -> Recipe:
    """Return a recipe for two CPU cores: a hybrid (one attention layer to three GDN) on Python's standard library.

    Its 250 steps finish within three minutes. At the end the model continues the first lines of a class: a model of
    this size has learnt the form of Python, but cannot yet copy names from the prompt.
    """
    recipe, step = tiny_setting(), 2**11
    return replace(
        recipe,
        optimizer=replace(recipe.optimizer, total_tokens=Tokens(250 * step), warmup_tokens=Tokens(25 * step)),
        run=replace(
            recipe.run,
            evaluations=["perplexity-by-position"],
            sample_prompt="class Reader:\n    def __init__(self, ",
        ),
    )


def tiny_setting() -> Recipe:
    """Return the recipe from which `tiny` and its variants are derived; it has 400 steps, like the variants."""
    return Recipe(
        name="tiny",
        description="GDN with one attention layer in four, on the built-in corpus; minutes on a laptop",
        model={
            "vocab_size": BYTE_VOCAB,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "intermediate_size": 384,
            "mixers": [GDN, GDN, GDN, ATTENTION],
            "mixer_options": {
                GDN: {"num_heads": 2, "head_dim": 64, "expand_v": 1.0},
                ATTENTION: {"num_heads": 4},
            },
            "max_position_embeddings": 256,
        },
        # joined documents: most files of this source are longer than a row, so few rows have boundaries inside
        data=DataRecipe(sources=["stdlib"], tokenizer="bytes", seq_len=256, documents="joined"),
        optimizer=OptimizerRecipe.in_steps(400, 40, 2**11, learning_rate=4e-3, min_learning_rate=2e-4, adam_beta2=0.98),
        run=RunRecipe(
            logging_steps=20,
            save_steps=200,
            save_total_limit=1,
            evaluations=["perplexity-by-position", "copy"],
            evaluation_lengths=[256],
            evaluation_limit=128,
            sample_prompt="def ",
        ),
    )


def _tiny_variant(name: str, mixer: str, **options: Any) -> Recipe:
    """Return a recipe for a model of one mixer, with the data and schedule of `tiny_setting`."""
    recipe = tiny_setting()
    model = {**recipe.model, "mixers": [mixer], "mixer_options": {mixer: options}}
    return replace(recipe, name=name, description=f"{mixer} alone, otherwise as tiny but for 400 steps", model=model)


class _RecallSize(NamedTuple):
    """Sizes of a model for associative recall, with its number of steps, batch size and learning rate."""

    vocab: int
    seq_len: int
    width: int
    layers: int
    mlp: int
    heads: int
    gdn: dict[str, Any]
    deviation: float
    steps: int
    batch: int
    learning_rate: float


_RECALL_SIZES = {
    "small": _RecallSize(
        1024, 512, 128, 2, 0, 2, {"num_heads": 1, "head_dim": 64, "expand_v": 1.0}, 0.02, 2000, 2**14, 3e-3
    ),
    "100m": _RecallSize(
        1024, 1024, 768, 12, 2048, 6, {"num_heads": 3, "head_dim": 128, "expand_v": 2.0}, 0.005, 3000, 2**13, 5e-4
    ),
    # 12 wide layers instead of the 24 of language models of this size, because deeper models learn recall later
    "340m": _RecallSize(
        2048, 2048, 1536, 12, 4096, 12, {"num_heads": 6, "head_dim": 128, "expand_v": 2.0}, 0.004, 3000, 2**13, 5e-4
    ),
}
_RECALL_MIXERS = {
    "transformer": [ATTENTION],
    "gdn": [GDN],
    "hybrid": [GDN, GDN, GDN, ATTENTION],
}


def recall(kind: str, size: str) -> Recipe:
    """Return a recipe for multi-query associative recall from random weights, with as many pairs as fit into a row.

    The small models are those of Zoology: two layers without MLPs, so that only the mixers can learn, and one GDN head
    of size 64, which cannot store 128 pairs. The other models have the sizes of language models. They learn recall only
    with a small learning rate, because an AdamW step changes a matrix's output by about its width times the learning
    rate, and with small initial weights, so that the embeddings dominate the layers' outputs. Recall depends more on
    the number of steps than on tokens, so that batches are small. Examples start with two pairs and grow in the first
    part of training.
    """
    sizes = _RECALL_SIZES[size]
    small = size == "small"
    mixers = [GDN, ATTENTION] if small and kind == "hybrid" else _RECALL_MIXERS[kind]
    options = {ATTENTION: {"num_heads": sizes.heads}, GDN: sizes.gdn}
    return Recipe(
        name=f"recall-{kind}-{size}",
        description=f"multi-query associative recall, {kind}, {size}; minutes on one GPU",
        model={
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.width,
            "num_hidden_layers": sizes.layers,
            "intermediate_size": sizes.mlp,
            "mixers": mixers,
            "mixer_options": {mixer: options[mixer] for mixer in dict.fromkeys(mixers)},
            "max_position_embeddings": sizes.seq_len,
            "initializer_range": sizes.deviation,
        },
        data=DataRecipe(
            sources=["mqar"],
            seq_len=sizes.seq_len,
            mqar_pairs=sizes.seq_len // 4,
            mqar_vocab_size=sizes.vocab,
            mqar_ramp=0.7,
        ),
        optimizer=OptimizerRecipe.in_steps(
            sizes.steps,
            40 if small else 100,
            sizes.batch,
            learning_rate=sizes.learning_rate,
            min_learning_rate=sizes.learning_rate / 20,
        ),
        run=RunRecipe(
            dataloader_num_workers=8,
            save_steps=5000,
            save_total_limit=1,
            evaluations=["mqar"],
            evaluation_lengths=[sizes.seq_len],
            evaluation_limit=64,
        ),
    )


def corpus(name: str, tokenizer: str, seq_len: int, seed: int = 0) -> DataRecipe:
    """Return the recipe of the data `data/<name>-<tokenizer>`, a token file that `data prepare` has made."""
    folder = f"data/{name}-{tokenizer.rpartition('/')[2]}"
    return DataRecipe(sources=[folder], tokenizer=tokenizer, seq_len=seq_len, documents="joined", data_seed=seed)


def model_fields(
    width: int, mixers: list[str], options: dict[str, dict[str, Any]], *, mlp: int, vocab: int, tie: bool
) -> dict[str, Any]:
    """Return a model configuration's fields; `mixers` has each layer's mixer, `options` each mixer's options.

    `mlp` is the inner width of MLPs, and `tie` decides whether the output layer has the embedding's weight.
    """
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": len(mixers),
        "intermediate_size": mlp,
        "mixers": mixers,
        "mixer_options": {label: options[label] for label in dict.fromkeys(mixers)},
        "tie_word_embeddings": tie,
    }


def language_model(
    name: str, description: str, model: dict[str, Any], data: DataRecipe, optimizer: OptimizerRecipe, *, seed: int = 0
) -> Recipe:
    """Return a recipe that trains a language model in bfloat16 and then evaluates its loss by position."""
    return Recipe(
        name=name,
        description=description,
        model={**model, "max_position_embeddings": data.seq_len},
        data=data,
        optimizer=optimizer,
        run=RunRecipe(
            precision="bf16",
            seed=seed,
            dataloader_num_workers=4,
            evaluations=["perplexity-by-position"],
            evaluation_lengths=[data.seq_len],
        ),
    )


class _Size(NamedTuple):
    """Width, layers and heads of a language model, heads of GDN, width of the MLP by mixer, peak learning rate."""

    width: int
    layers: int
    heads: int
    delta_heads: int
    mlps: dict[str, int]
    learning_rate: float


# every layer has about 13 · width² weights, whatever its mixer; learning rates are five times those of GPT-3
SIZES = {
    "130m": _Size(768, 12, 12, 4, {ATTENTION: 2304, MAMBA2: 1664, GDN: 1920}, 3e-3),
    "380m": _Size(1024, 24, 16, 6, {ATTENTION: 3072, MAMBA2: 2304, GDN: 2368}, 1.5e-3),
    "810m": _Size(1536, 24, 16, 9, {ATTENTION: 4608, MAMBA2: 3456, GDN: 3584}, 1.25e-3),
    "1.4b": _Size(2048, 24, 16, 12, {ATTENTION: 6144, MAMBA2: 4672, GDN: 4736}, 1e-3),
}
BASELINES = {"transformer": ATTENTION, "mamba2": MAMBA2, "gated_delta_net": GDN}


def baseline(kind: str, size: str) -> Recipe:
    """Return a recipe for Transformer++, Mamba-2 or Gated DeltaNet (`kind`) with the number of parameters `size`.

    The corpus is FineWeb-Edu, 100B tokens in rows of 2,048, prepared in `data/fineweb-edu-gpt2`.
    """
    sizes, mixer = SIZES[size], BASELINES[kind]
    options = {
        ATTENTION: {"num_heads": sizes.heads},
        MAMBA2: {"head_dim": 64, "state_size": 128},
        GDN: {"num_heads": sizes.delta_heads, "head_dim": 128, "expand_v": 2.0},
    }
    optimizer = OptimizerRecipe(
        total_tokens=Tokens("100B"),
        warmup_tokens=Tokens("10B"),
        batch_tokens=Tokens(2**20 if size == "1.4b" else 2**19),
        learning_rate=sizes.learning_rate,
        min_learning_rate=sizes.learning_rate / 10,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
    )
    return language_model(
        f"{kind}-{size}",
        f"{kind} with {size.upper()} parameters on FineWeb-Edu",
        model_fields(sizes.width, [mixer] * sizes.layers, options, mlp=sizes.mlps[mixer], vocab=GPT2_VOCAB, tie=True),
        corpus("fineweb-edu", GPT2, 2048),
        optimizer,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "tiny": tiny,
    "tiny-transformer": partial(_tiny_variant, "tiny-transformer", ATTENTION, num_heads=4),
    "tiny-gdn": partial(_tiny_variant, "tiny-gdn", GDN, num_heads=2, head_dim=64, expand_v=1.0),
    "tiny-mamba2": partial(_tiny_variant, "tiny-mamba2", MAMBA2, expand=1.0, head_dim=64, state_size=64),
    **{f"recall-{kind}-{size}": partial(recall, kind, size) for kind in _RECALL_MIXERS for size in _RECALL_SIZES},
    **{f"{kind}-{size}": partial(baseline, kind, size) for kind in BASELINES for size in SIZES},
}
