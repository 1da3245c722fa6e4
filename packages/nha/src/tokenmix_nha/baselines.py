"""The paper's baselines in its setting: 15B or 100B tokens of SlimPajama in rows of 2,048 tokens.

Details that the paper does not state are chosen so that all models of one size have equally many parameters (a test
counts them): a vocabulary of 32,000 with tied embeddings; Gated DeltaNet with K = 128, V = 256 and a number of heads
that gives it the parameters of softmax attention; narrower MLPs for Mamba-2.
"""

from __future__ import annotations

from typing import Any

from tokenmix_core.nn import swiglu_width
from tokenmix_core.training import (
    ATTENTION,
    GDN,
    LLAMA2,
    LLAMA2_VOCAB,
    MAMBA2,
    OptimizerRecipe,
    Recipe,
    Tokens,
    corpus,
    language_model,
    model_fields,
)

GLA = "gla"
# width, number of layers, and index of the full-attention layer in every block of eight layers
SIZES = {"340m": (1024, 24, 6), "1.3b": (2048, 24, 0)}
# "-hybrid" models have one full-attention layer in every eight layers
BASELINES = ("transformer", "gla", "gdn", "mamba2", "mamba2-hybrid", "gla-hybrid", "gdn-hybrid")
_MIXERS = {"transformer": ATTENTION, "gla": GLA, "gdn": GDN, "mamba2": MAMBA2}
_DELTA_HEADS = {"340m": 4, "1.3b": 8}
_NARROW = {"340m": 2112, "1.3b": 4352}


def baseline(kind: str, size: str) -> Recipe:
    """Return the recipe of a baseline of Table 1, as trained in the paper."""
    mixer, _, hybrid = kind.partition("-")
    width, layers, full_layer = SIZES[size]
    options: dict[str, dict[str, Any]] = {
        ATTENTION: {"num_heads": width // 64},
        GDN: {"num_heads": _DELTA_HEADS[size], "head_dim": 128, "expand_v": 2.0},
        MAMBA2: {"head_dim": 64, "state_size": 128},
        GLA: {"num_heads": 4},
    }
    block = [ATTENTION if hybrid and i == full_layer else _MIXERS[mixer] for i in range(8)]
    mlp = _NARROW[size] if mixer == "mamba2" else swiglu_width(width)
    small = size == "340m"
    optimizer = OptimizerRecipe(
        total_tokens=Tokens("15B" if small else "100B"),
        warmup_tokens=Tokens("0.5B" if small else "1B"),
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        weight_decay=0.01,
        max_grad_norm=1.0,
    )
    return language_model(
        f"{kind}-{size}",
        f"{mixer}{' with full layers' if hybrid else ''}, {size.upper()} parameters, as trained in the paper",
        model_fields(width, block * (layers // 8), options, mlp=mlp, vocab=LLAMA2_VOCAB, tie=True),
        corpus("slimpajama", LLAMA2, 2048, seed=42),
        optimizer,
        seed=42,
    )
