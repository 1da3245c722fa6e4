"""The paper's baselines in its setting: 15B or 50B tokens of FineWeb-Edu in rows of 4,096 tokens.

The paper does not state some sizes. They are chosen such that models have the paper's parameter counts (a test checks
these): a vocabulary of 32,000 with an untied output layer; in Gated DeltaNet, q and k are 3/4 as wide as the model, and
v is twice as wide as k, so that its 6 heads have K = 128 and V = 256 at width 1024, K = 192 and V = 384 at width 1536.
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
    DataRecipe,
    OptimizerRecipe,
    Recipe,
    Tokens,
    corpus,
    language_model,
    model_fields,
)

# width, and number of attention heads
SIZES = {"380m": (1024, 16), "800m": (1536, 24)}
BASELINES = {
    "gdn": [GDN] * 21,
    "gdn-hybrid": [GDN, GDN, GDN, ATTENTION] * 5 + [GDN, GDN],
    "transformer": [ATTENTION] * 24,
    "mamba2": [MAMBA2] * 48,
}


def delta_rule(size: str) -> dict[str, Any]:
    """Return the options of Gated DeltaNet layers."""
    return {"num_heads": 6, "head_dim": SIZES[size][0] * 3 // 4 // 6, "expand_v": 2.0}


def setting(size: str) -> tuple[DataRecipe, OptimizerRecipe]:
    """Return the data and the optimizer of all models of a size (appendix A of the paper)."""
    small = size == "380m"
    optimizer = OptimizerRecipe(
        total_tokens=Tokens("15B" if small else "50B"),
        warmup_tokens=Tokens("0.5B" if small else "1B"),
        learning_rate=3e-4,
        initial_learning_rate=3e-5,
        min_learning_rate=3e-5,
        # the value of the authors' code
        adam_epsilon=1e-15,
    )
    return corpus("fineweb-edu", LLAMA2, 4096), optimizer


def baseline(kind: str, size: str) -> Recipe:
    """Return the recipe of a baseline in Table 1 or 5, trained as in the paper."""
    width, heads = SIZES[size]
    options = {
        GDN: delta_rule(size),
        ATTENTION: {"num_heads": heads},
        MAMBA2: {"head_dim": 64, "state_size": 128},
    }
    mlp = 0 if kind == "mamba2" else swiglu_width(width)
    return language_model(
        f"{kind}-{size}",
        f"{kind} with {size.upper()} parameters, as trained in the paper",
        model_fields(width, BASELINES[kind], options, mlp=mlp, vocab=LLAMA2_VOCAB, tie=False),
        *setting(size),
    )
