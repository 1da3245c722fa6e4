"""Time NAtS-L's two operations together and alone, its layer and those that it combines, and attention to its cache.

The "pair" is the part between the projections of the paper's 380M layer, without norms: the gated delta rule with a
write mask, and attention to the own and retained chunks. "attention" is cuDNN's full attention, and "GDN" our gated
delta rule without a mask; both compute something else, and serve as baselines.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmix_core.nn.attention import Attention
from tokenmix_core.nn.gated_delta_net import GatedDeltaNet
from tokenmix_core.nn.state import PagedKVState, Pages
from tokenmix_core.ops import attention_decode
from tokenmix_core.testing.benchmarking import measure, measure_step
from tokenmix_nats_l.chunks import ChunkTypes, Tokens
from tokenmix_nats_l.mixer import NatsL

WIDTH = 1024
SHARES = (0.0, 0.25, 0.5)
# batch, tokens
PAIRS = [(2, 4096), (1, 32768)]
LENGTHS = (2048, 8192, 32768, 131072)
CPU_SIZES = {"num_heads": 2, "head_dim": 16, "num_softmax_heads": 4}


def make_types(share: float, batch: int, chunks: int, heads: int, device: str) -> ChunkTypes:
    """Return types with evenly spaced softmax chunks at the given share, shifted from head to head."""
    position = torch.arange(chunks, device=device).unsqueeze(1) + torch.arange(heads, device=device)
    softmax = (((position + 1) * share).floor() > (position * share).floor()).float().expand(batch, -1, -1).contiguous()
    return ChunkTypes(softmax.requires_grad_(), (1 - softmax).detach().requires_grad_(), None)


def pair_rows(batch: int, tokens: int, device: str) -> list[dict]:
    """Measure both operations at each share of softmax chunks, and each operation alone."""
    cpu = device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    layer = NatsL(WIDTH, **(CPU_SIZES if cpu else {})).to(device)
    H, HA, K, V = layer.num_heads, layer.num_softmax_heads, layer.head_dim, layer.value_dim
    q, k = (torch.randn(batch, tokens, H * K, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.randn(batch, tokens, H * V, device=device, dtype=dtype, requires_grad=True)
    g = (-torch.rand(batch, tokens, H, device=device)).requires_grad_()
    beta = torch.rand(batch, tokens, H, device=device, requires_grad=True)

    def projected() -> Tokens:
        whole, cut = ([x.unflatten(-1, (heads, -1)) for x in (q, k, v)] for heads in (H, HA))
        return Tokens(*whole, *cut, g, beta, q)

    def both(types: ChunkTypes) -> Tensor:
        linear, softmax = layer.mix(projected(), types, None)
        return linear + softmax

    def attention() -> Tensor:
        heads = (x.unflatten(-1, (HA, -1)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH if cpu else SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    rows, shape = [], f"B{batch} T{tokens} H{H} K{K} V{V} HA{HA}"
    for share in SHARES:
        types = make_types(share, batch, -(-tokens // layer.chunk), H, device)
        leaves = (q, k, v, g, beta, types.softmax, types.linear)
        forwards = {"NAtS-L": lambda types=types: both(types)}
        rows += measure(f"pair, softmax share {share:g}", shape, device, forwards, leaves, repeats=3 if cpu else 50)
    for name, forward, leaves in (
        ("GDN", lambda: layer.delta_rule(projected(), None)[0], (q, k, v, g, beta)),
        ("attention", attention, (q, k, v)),
    ):
        rows += measure("pair", shape, device, {name: forward}, leaves, repeats=3 if cpu else 50)
    return rows


def layer_rows(tokens: int, device: str) -> list[dict]:
    """Measure the layer with half or no softmax chunks, and layers of a single operation of the same width."""
    cpu = device == "cpu"
    width, dtype = (64, torch.float32) if cpu else (WIDTH, torch.bfloat16)
    sizes = CPU_SIZES if cpu else {}
    gdn = {"num_heads": 2, "head_dim": 16, "expand_v": 2.0} if cpu else {"num_heads": 6, "head_dim": 128}
    layers = {
        "NAtS-L, half softmax": NatsL(width, types="alternate", **sizes),
        "NAtS-L, all linear": NatsL(width, types="linear", **sizes),
        "GDN": GatedDeltaNet(width, **gdn),
        "attention": Attention(width, num_heads=width // 64, rope=False),
    }
    x = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=True)
    rows = []
    for name, layer in layers.items():
        layer = layer.to(device, dtype)
        leaves = (x, *(p for p in layer.parameters() if p.dim() > 1))
        rows += measure(
            "layer", f"T{tokens} D{width}", device, {name: lambda layer=layer: layer(x)[0]}, leaves,
            repeats=3 if cpu else 20,
        )  # fmt: skip
    return rows


def retained_rows(tokens: int, device: str) -> list[dict]:
    """Measure a step's attention to retained chunks, one head in six entirely softmax, and to all keys."""
    layer = NatsL(WIDTH, **(CPU_SIZES if device == "cpu" else {}))
    H, K, V, C = layer.num_softmax_heads, layer.softmax_dim, layer.softmax_value_dim, layer.chunk
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, n, H, d, device=device, dtype=dtype) for n, d in ((1, K), (tokens, K), (tokens, V)))
    take = torch.rand(1, tokens // C, H, device=device) < 0.05
    take[..., ::6] = True
    kept, everything = PagedKVState(H, K, V, page=C), torch.tensor([tokens], dtype=torch.int32, device=device)
    kept.append(k, v, take, known=Pages(int(take.sum()), tokens // C))
    forwards = {
        "NAtS-L": lambda: kept.attend(q.squeeze(1)).o,
        "all keys": lambda: attention_decode(q, k, v, everything).o,
    }
    sizes = f"T{tokens} H{H} K{K} V{V}, {kept.allocated / kept.held(tokens):.3f} of the bytes in use allocated"
    return measure_step("retained chunks", sizes, device, forwards)


def rows(device: str) -> list[dict]:
    """Measure on `device`: the pair at the paper's shapes, then layers and retained chunks by length."""
    out = []
    for batch, tokens in PAIRS if device != "cpu" else [(1, 256)]:
        out += pair_rows(batch, tokens, device)
    for tokens in LENGTHS if device != "cpu" else (256,):
        out += layer_rows(tokens, device)
        out += retained_rows(tokens, device)
    return out
