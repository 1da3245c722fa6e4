"""Reference for FLA's models: random checkpoints in FLA's layout, and their logits in plain PyTorch.

The code follows fla-core 0.6 (`fla/models`, `fla/layers`) layer by layer, without FLA's kernels. Tests compare
converted checkpoints with these logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]
# eps of those norms that FLA makes without the configuration's `norm_eps`
_DEFAULT_EPS = 1e-5


def fla_folder(path: Path, config: dict[str, Any], *, seed: int = 0) -> Weights:
    """Write random weights in FLA's layout to a folder; return the weights in float32 by FLA's names."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(config).items():
        x = torch.randn(shape, generator=generator)
        # values far from the initial 1 and 0, so that a lost weight changes the logits
        weights[name] = 1 + x / 4 if "norm" in name else x * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return weights


def fla_logits(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    """Compute the logits `[B, T, vocab]` of FLA's language model of this configuration and these weights."""
    eps = config["norm_eps"]
    x = weights["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        own = {n.removeprefix(p): w for n, w in weights.items() if n.startswith(p := f"model.layers.{i}.")}
        y = _norm(x, own["attn_norm.weight"], eps)
        part = {n.removeprefix("attn."): w for n, w in own.items() if n.startswith("attn.")}
        spec = _attends(config, i)
        x = x + (_MIXERS[config["model_type"]](config, part, y) if spec is None else _attention(spec, part, y))
        y = _norm(x, own["mlp_norm.weight"], eps)
        gate, up, down = (own[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    x = _norm(x, weights["model.norm.weight"], eps)
    return x @ weights.get("lm_head.weight", weights["model.embeddings.weight"]).T


def _attends(config: dict[str, Any], layer: int) -> dict[str, Any] | None:
    if config["model_type"] == "transformer":
        return config
    return next((spec for spec in config.get("attn") or [] if layer in spec["layers"]), None)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, vocab, inner = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, width)
    for i in range(config["num_hidden_layers"]):
        spec = _attends(config, i)
        attn = _MIXER_SHAPES[config["model_type"]](config) if spec is None else _attention_shapes(spec, width)
        layer = {"attn_norm.weight": (width,), "mlp_norm.weight": (width,)} | {f"attn.{n}": s for n, s in attn.items()}
        layer |= {f"mlp.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
        layer |= {"mlp.down_proj.weight": (width, inner)}
        shapes |= {f"model.layers.{i}.{n}": s for n, s in layer.items()}
    return shapes


def _attention_shapes(spec: dict[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    head = width // spec["num_heads"]
    kv = head * (spec.get("num_kv_heads") or spec["num_heads"])
    shapes: dict[str, tuple[int, ...]] = {f"{n}_proj.weight": (width, width) for n in "qo"}
    shapes |= {f"{n}_proj.weight": (kv, width) for n in "kv"}
    if spec.get("qkv_bias"):
        shapes |= {"q_proj.bias": (width,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
    return shapes | ({f"{n}_norm.weight": (head,) for n in "qk"} if spec.get("qk_norm") else {})


def _delta_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, value_heads = config["hidden_size"], config.get("num_v_heads") or config["num_heads"]
    keys = config["num_heads"] * config["head_dim"]
    value = int(config["head_dim"] * config["expand_v"])
    values = value_heads * value
    shapes: dict[str, tuple[int, ...]] = {f"{n}_proj.weight": (keys, width) for n in "qk"}
    shapes |= {f"{n}_proj.weight": (values, width) for n in ("vg" if config["use_gate"] else "v")}
    shapes |= {f"{n}_proj.weight": (value_heads, width) for n in "ab"} | {"o_proj.weight": (width, values)}
    shapes |= {f"{n}_conv1d.weight": (values if n == "v" else keys, 1, config["conv_size"]) for n in "qkv"}
    return shapes | {"A_log": (value_heads,), "dt_bias": (value_heads,), "o_norm.weight": (value,)}


def _gla_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = config["hidden_size"]
    keys, values = int(width * config["expand_k"]), int(width * config["expand_v"])
    return {
        "q_proj.weight": (keys, width), "k_proj.weight": (keys, width), "v_proj.weight": (values, width),
        "g_proj.weight": (values, width), "gk_proj.0.weight": (16, width), "gk_proj.1.weight": (keys, 16),
        "gk_proj.1.bias": (keys,), "o_proj.weight": (width, values),
        "g_norm_swish_gate.weight": (values // config["num_heads"],),
    }  # fmt: skip


def _gsa_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["hidden_size"], config["num_heads"]
    kv_heads = config.get("num_kv_heads") or heads
    return {
        "q_proj.weight": (width, width), "k_proj.weight": (width * kv_heads // heads, width),
        "v_proj.weight": (width * kv_heads // heads, width), "f_proj.weight": (kv_heads * config["num_slots"], width),
        "g_norm.weight": (width,), "o_proj.weight": (width, width),
    }  # fmt: skip


_MIXER_SHAPES = {"gated_deltanet": _delta_shapes, "gla": _gla_shapes, "gsa": _gsa_shapes}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _attention(spec: dict[str, Any], w: Weights, x: Tensor) -> Tensor:
    heads = spec["num_heads"]
    kv_heads = spec.get("num_kv_heads") or heads
    size = x.shape[-1] // heads
    q, k, v = ((x @ w[f"{n}_proj.weight"].T + w.get(f"{n}_proj.bias", 0)).unflatten(-1, (-1, size)) for n in "qkv")
    if spec.get("qk_norm"):
        q, k = _norm(q, w["q_norm.weight"], _DEFAULT_EPS), _norm(k, w["k_norm.weight"], _DEFAULT_EPS)
    positions = torch.arange(x.shape[1])
    angles = positions[:, None] * spec["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k = (torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in (y.chunk(2, -1) for y in (q, k)))
    k, v = (y.repeat_interleave(heads // kv_heads, 2) for y in (k, v))
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (spec.get("window_size") or x.shape[1]))
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * size**-0.5
    share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", share, v).flatten(-2) @ w["o_proj.weight"].T


def _delta(config: dict[str, Any], w: Weights, x: Tensor) -> Tensor:
    def convolved(n: str) -> Tensor:
        y, weight = (x @ w[f"{n}_proj.weight"].T).mT, w[f"{n}_conv1d.weight"]
        return F.silu(F.conv1d(y, weight, groups=weight.shape[0], padding=weight.shape[-1] - 1)[..., : x.shape[1]]).mT

    key, value = config["head_dim"], int(config["head_dim"] * config["expand_v"])
    q, k, v = (convolved(n).unflatten(-1, (-1, value if n == "v" else key)) for n in "qkv")
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    q, k = (y.repeat_interleave(v.shape[2] // y.shape[2], 2) for y in (q, k))
    g = -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
    beta = (x @ w["b_proj.weight"].T).sigmoid() * (2 if config["allow_neg_eigval"] else 1)
    state, o = x.new_zeros(x.shape[0], v.shape[2], key, value), []
    for t in range(x.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
        o.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * key**-0.5)
    y = _norm(torch.stack(o, 1), w["o_norm.weight"], config["norm_eps"])
    if config["use_gate"]:
        y = y * F.silu(x @ w["g_proj.weight"].T).view_as(y)
    return y.flatten(-2) @ w["o_proj.weight"].T


def _gla(config: dict[str, Any], w: Weights, x: Tensor) -> Tensor:
    q, k, v, gate = ((x @ w[f"{n}_proj.weight"].T).unflatten(-1, (config["num_heads"], -1)) for n in "qkvg")
    g = x @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
    decay = (F.logsigmoid(g) / 16).exp().view_as(k)
    state, o = x.new_zeros(x.shape[0], *k.shape[2:], v.shape[-1]), []
    for t in range(x.shape[1]):
        state = state * decay[:, t].unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        o.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * k.shape[-1] ** -0.5)
    y = _norm(torch.stack(o, 1), w["g_norm_swish_gate.weight"], config["norm_eps"]) * F.silu(gate)
    return y.flatten(-2) @ w["o_proj.weight"].T


def _gsa(config: dict[str, Any], w: Weights, x: Tensor) -> Tensor:
    heads, kv_heads = config["num_heads"], config.get("num_kv_heads") or config["num_heads"]
    q, k, v = (F.silu(x @ w[f"{n}_proj.weight"].T).unflatten(-1, (-1, x.shape[-1] // heads)) for n in "qkv")
    f = F.logsigmoid(x @ w["f_proj.weight"].T).unflatten(-1, (kv_heads, -1)) / config["gate_logit_normalizer"]
    k, v, f = (y.repeat_interleave(heads // kv_heads, 2) for y in (k, v, f))
    keys = x.new_zeros(x.shape[0], heads, f.shape[-1], k.shape[-1])
    values, o = torch.zeros_like(keys), []
    for t in range(x.shape[1]):
        kept = f[:, t].exp().unsqueeze(-1)
        keys = kept * keys + (1 - kept) * k[:, t].unsqueeze(-2)
        values = kept * values + (1 - kept) * v[:, t].unsqueeze(-2)
        share = torch.einsum("bhmk,bhk->bhm", keys, q[:, t]).softmax(-1)
        o.append(torch.einsum("bhm,bhmv->bhv", share, values))
    y = _norm(F.silu(torch.stack(o, 1).flatten(-2)), w["g_norm.weight"], _DEFAULT_EPS)
    return y @ w["o_proj.weight"].T


_MIXERS = {"gated_deltanet": _delta, "gla": _gla, "gsa": _gsa}
