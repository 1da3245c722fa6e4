"""Configurations of the models that the papers compare with, by the sizes they state; tests derive their counts.

Where a paper leaves a size open, the one is taken that gives the stated number of parameters:

- `nats_l`: vocabulary of 32,000 and an output layer of its own; q and k as wide as 3/4 of the model and v twice that in
  Gated DeltaNet, so that its 6 heads have K = 128 and V = 256 at width 1024, K = 192 and V = 384 at width 1536.
- `lte`: vocabulary of 32,000; Gated DeltaNet heads with K = V = width / 8.
- `nha`: vocabulary of 32,000, tied; Gated DeltaNet with K = 128, V = 256 and as many heads as give it the weights of
  softmax attention; narrower MLPs beside Mamba-2 for the same reason.
- `oryx`: vocabulary of 50,257, tied; MLPs widened to 13 · width² weights a layer, which is what an ORYX layer has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmix_core.modeling.config import HybridConfig
from tokenmix_core.nn.mlp import swiglu_width

GPT2_VOCAB, LLAMA2_VOCAB = 50257, 32000
GDN, ATTENTION, MAMBA2 = "gated_delta_net", "attention", "mamba2"


def baseline(name: str) -> HybridConfig:
    """The configuration of a baseline, such as `baseline("nats_l/gated_delta_net-800m")`.

    Raises:
        ValueError: an unknown name.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; known are {', '.join(sorted(BASELINES))}")
    return BASELINES[name]()


def _nats_l(width: int) -> dict[str, Callable[[], HybridConfig]]:
    heads = {1024: 16, 1536: 24}[width]
    options = {
        GDN: {"num_heads": 6, "head_dim": width * 3 // 4 // 6, "expand_v": 2.0},
        ATTENTION: {"num_heads": heads},
        MAMBA2: {"head_dim": 64, "state_size": 128},
    }

    def make(mixers: list[str], mlp: int | None = None) -> Callable[[], HybridConfig]:
        mlp = swiglu_width(width) if mlp is None else mlp
        return lambda: _config(width, mixers, options, mlp, LLAMA2_VOCAB, tie=False)

    return {
        "transformer": make([ATTENTION] * 24),
        "gated_delta_net": make([GDN] * 21),
        "mamba2": make([MAMBA2] * 48, mlp=0),
        "gated_delta_net_hybrid": make([GDN, GDN, GDN, ATTENTION] * 5 + [GDN, GDN]),
    }


def _lte(width: int) -> dict[str, Callable[[], HybridConfig]]:
    attention = {1024: {"num_heads": 16}, 2048: {"num_heads": 32, "num_kv_heads": 8}}[width]
    options = {
        GDN: {"num_heads": 8, "head_dim": width // 8, "expand_v": 1.0},
        ATTENTION: attention,
        "window": {"type": ATTENTION, **attention, "window": 1024},
    }

    def make(mixers: list[str]) -> Callable[[], HybridConfig]:
        return lambda: _config(width, mixers, options, swiglu_width(width), LLAMA2_VOCAB, tie=width == 1024)

    return {
        "transformer": make([ATTENTION] * 24),
        "gated_delta_net": make([GDN] * 24),
        "gated_delta_net_attention": make([GDN, ATTENTION] * 12),
        "gated_delta_net_window": make([GDN, "window"] * 12),
    }


def _nha(width: int) -> dict[str, Callable[[], HybridConfig]]:
    # the place of the softmax layer in every block of eight
    place, heads, narrow = {1024: (6, 4, 2112), 2048: (0, 8, 4352)}[width]
    options = {
        GDN: {"num_heads": heads, "head_dim": 128, "expand_v": 2.0},
        ATTENTION: {"num_heads": width // 64},
        MAMBA2: {"head_dim": 64, "state_size": 128},
    }

    def make(linear: str, mlp: int | None = None, *, hybrid: bool = True) -> Callable[[], HybridConfig]:
        mlp = swiglu_width(width) if mlp is None else mlp
        block = [ATTENTION if hybrid and i == place else linear for i in range(8)]
        return lambda: _config(width, block * 3, options, mlp, LLAMA2_VOCAB, tie=True)

    return {
        "transformer": make(ATTENTION),
        "gated_delta_net": make(GDN, hybrid=False),
        "gated_delta_net_hybrid": make(GDN),
        "mamba2_hybrid": make(MAMBA2, narrow),
    }


def _oryx(width: int) -> dict[str, Callable[[], HybridConfig]]:
    layers, heads, delta_heads, mamba_mlp, delta_mlp = {
        768: (12, 12, 4, 1664, 1920),
        1024: (24, 16, 6, 2304, 2368),
        1536: (24, 16, 9, 3456, 3584),
        2048: (24, 16, 12, 4672, 4736),
    }[width]
    options = {
        ATTENTION: {"num_heads": heads},
        MAMBA2: {"head_dim": 64, "state_size": 128},
        GDN: {"num_heads": delta_heads, "head_dim": 128, "expand_v": 2.0},
    }

    def make(mixer: str, mlp: int) -> Callable[[], HybridConfig]:
        return lambda: _config(width, [mixer] * layers, options, mlp, GPT2_VOCAB, tie=True)

    return {
        "transformer": make(ATTENTION, 3 * width),
        "mamba2": make(MAMBA2, mamba_mlp),
        "gated_delta_net": make(GDN, delta_mlp),
    }


def _config(
    width: int, mixers: list[str], options: dict[str, dict[str, Any]], mlp: int, vocab: int, *, tie: bool
) -> HybridConfig:
    return HybridConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=len(mixers),
        intermediate_size=mlp,
        mixers=mixers,
        mixer_options={label: options[label] for label in dict.fromkeys(mixers)},
        tie_word_embeddings=tie,
    )


BASELINES: dict[str, Callable[[], HybridConfig]] = {
    f"{paper}/{kind}-{size}": make
    for paper, family, sizes in (
        ("nats_l", _nats_l, {"380m": 1024, "800m": 1536}),
        ("lte", _lte, {"0.4b": 1024, "1.4b": 2048}),
        ("nha", _nha, {"340m": 1024, "1.3b": 2048}),
        ("oryx", _oryx, {"130m": 768, "380m": 1024, "810m": 1536, "1.4b": 2048}),
    )
    for size, width in sizes.items()
    for kind, make in family(width).items()
}
