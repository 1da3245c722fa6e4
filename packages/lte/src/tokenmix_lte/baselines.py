"""The paper's baselines in its setting: 10B or 32B tokens of FineWeb-Edu in rows of 4,096 tokens.

The vocabulary has 32,000 tokens, and Gated DeltaNet has 8 heads of K = V = width / 8. All models of a size share width,
depth and MLP, so their parameter counts differ by the mixers.
"""

from __future__ import annotations

from tokenmix_core.nn import swiglu_width
from tokenmix_core.training import (
    ATTENTION,
    GDN,
    LLAMA2,
    LLAMA2_VOCAB,
    OptimizerRecipe,
    Recipe,
    Tokens,
    corpus,
    language_model,
    model_fields,
)

WINDOW = "window"
# by size: width, and the options of softmax attention layers
SIZES = {
    "0.4b": (1024, {"num_heads": 16}),
    "1.4b": (2048, {"num_heads": 32, "num_kv_heads": 8}),
}
BASELINES = {
    "gdn": [GDN] * 24,
    "gdn-swa": [GDN, WINDOW] * 12,
    "gdn-attention": [GDN, ATTENTION] * 12,
    "transformer": [ATTENTION] * 24,
}
# standard deviation of the initial weights in the paper's code
DEVIATION = 0.006


def baseline(kind: str, size: str) -> Recipe:
    """Return the recipe of a baseline in Tables 1 to 3, trained as in the paper."""
    width, attention = SIZES[size]
    options = {
        GDN: {"num_heads": 8, "head_dim": width // 8, "expand_v": 1.0},
        ATTENTION: attention,
        WINDOW: {"type": ATTENTION, **attention, "window": 1024},
    }
    batch, steps, warmup = (2**19, 20480, 1024) if size == "0.4b" else (2**20, 30720, 512)
    optimizer = OptimizerRecipe(
        total_tokens=Tokens(steps * batch),
        warmup_tokens=Tokens(warmup * batch),
        batch_tokens=Tokens(batch),
        learning_rate=3e-4,
        min_learning_rate=3e-5,
        adam_epsilon=1e-15,
    )
    fields = model_fields(
        width, BASELINES[kind], options, mlp=swiglu_width(width), vocab=LLAMA2_VOCAB, tie=size == "0.4b"
    )
    return language_model(
        f"{kind}-{size}",
        f"{kind} with {size.upper()} parameters, as trained in the paper",
        {**fields, "initializer_range": DEVIATION},
        corpus("fineweb-edu", LLAMA2, 4096, seed=42),
        optimizer,
        seed=42,
    )
