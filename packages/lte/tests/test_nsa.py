"""Native sparse attention: contracts of every mixer, the definition, and the keys that decoding reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.rotary import RotaryEmbedding, apply_rotary
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.mixers import MixerContract, run_in_parts, run_mixer
from tokenmix_lte.nsa import Nsa

# blocks and windows so small that most keys are not selected
SMALL = partial(Nsa, 32, num_heads=4, num_kv_heads=2, head_dim=8, block=4, blocks=4, window=5)


class TestNsa(MixerContract):
    cases: ClassVar[dict[str, Callable[[], Mixer]]] = {
        "paper": SMALL,
        "one head of keys, odd blocks": partial(SMALL, num_kv_heads=1, block=3, blocks=3, window=1),
    }
    tokens = 45


def build(**options) -> Nsa:
    torch.manual_seed(0)
    layer = SMALL(**options)
    for module in layer.modules():
        init_weights_(module, 0.3)
    return layer.double().eval()


def inputs(B=2, T=45, seed=1) -> Tensor:
    return torch.randn(B, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def literal(layer: Nsa, x: Tensor) -> Tensor:
    """Compute the layer's definition query by query."""
    rotary = RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.arange(x.shape[1]).unsqueeze(0))
    q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
    gates = layer.g_proj(x).sigmoid().unflatten(-1, (-1, 3))
    (B, T, HQ, K), H, size = q.shape, k.shape[2], layer.block
    out = torch.zeros_like(q)

    def attend(query, keys, values):
        p = (keys @ query * K**-0.5).softmax(0)
        return p @ values, p

    for b in range(B):
        for h in range(H):
            group = range(h * HQ // H, (h + 1) * HQ // H)
            for i in range(T):
                own, complete = i // size, (i + 1) // size
                means = [[y[b, c * size : (c + 1) * size, h].mean(0) for c in range(complete)] for y in (k, v)]
                attention = torch.zeros(own + 1, dtype=torch.float64)
                for a in group if complete else ():
                    o, p = attend(q[b, i, a], *map(torch.stack, means))
                    out[b, i, a] += gates[b, i, a, 0] * o
                    attention[:own] += p[:own]
                forced = {c for c in (0, own - 1, own) if c >= 0}
                others = sorted(set(range(own)) - forced, key=lambda c: -attention[c])
                chosen = forced | set(others[: layer.blocks - len(forced)])
                seen = [j for j in range(i + 1) if j // size in chosen]
                near = list(range(max(0, i - layer.window + 1), i + 1))
                for a in group:
                    for gate, keys in ((1, seen), (2, near)):
                        out[b, i, a] += gates[b, i, a, gate] * attend(q[b, i, a], k[b, keys, h], v[b, keys, h])[0]
    return layer.o_proj(out.flatten(-2))


@torch.no_grad()
def test_the_layer_agrees_with_its_definition():
    layer, x = build(), inputs()
    assert relative_error(run_mixer(layer, x), literal(layer, x)) < 1e-11


@torch.no_grad()
def test_a_step_reads_only_the_selected_blocks_and_the_window():
    layer, x = build(), inputs(B=1, T=120)
    whole = run_mixer(layer, x)
    _, cache = run_in_parts(layer, x[:, :119], [119])
    state = cache.layers[0]
    cache.begin(1, 1, x.device)
    rotary = RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.tensor([[119]]))
    # the last token's block is 29, the window 115 … 119
    chosen = selected_blocks(layer, x)
    unread = [c for c in range(28) if c not in chosen]
    assert len(unread) >= 20
    for c in unread:
        state.kv.keys[:, 4 * c : 4 * c + 4] = torch.nan
    assert relative_error(layer(x[:, 119:], state=state, rotary=rotary)[0], whole[:, 119:]) < 1e-11


def selected_blocks(layer: Nsa, x: Tensor) -> set[int]:
    """Return the union of the blocks that the key heads select for the last token."""
    from tokenmix_lte.ops import select_blocks
    from tokenmix_lte.ops.pooled_blocks import compressed_attention, pool_blocks

    rotary = RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.arange(x.shape[1]).unsqueeze(0))
    q, k = (apply_rotary(f(x).unflatten(-1, (-1, 8)), rotary) for f in (layer.q_proj, layer.k_proj))
    means = pool_blocks(k, 4)
    lse = compressed_attention(q, means, means, 4).lse
    return set(select_blocks(q, means, lse, layer.blocks, block_size=4)[0, -1].flatten().tolist())


@torch.no_grad()
def test_split_calls_agree_with_one_call_in_bfloat16():
    layer, x = build(block=8, window=16).bfloat16(), inputs(T=60).bfloat16()
    whole = run_mixer(layer, x)
    for lengths in ([1] * 60, [30, *[1] * 10, 20]):
        assert relative_error(run_in_parts(layer, x, lengths)[0], whole) < 2e-2


def test_the_paper_s_sizes():
    layer = Nsa(1024)
    assert layer.q_proj.out_features == 2048
    assert layer.g_proj.out_features == 96
    # a token's bfloat16 key and value for 2 heads of 64; means of 64 blocks, each as large; float32 sums of a block
    token, sums = 2 * 2 * 64 * 2, 2 * 2 * 64 * 4
    assert layer.state_bytes(4096) == 4096 * token + 64 * token + sums


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"blocks": 2}, "blocks must be at least 3"),
        ({"block": 0}, "block must be at least 1"),
        ({"window": 0}, "window"),
    ],
)
def test_malformed_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SMALL(**options)
