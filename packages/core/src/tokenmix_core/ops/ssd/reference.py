"""State-space duality in eager PyTorch: token by token (the specification) and chunkwise (used on CPUs)."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.ops.padding import drops_padding
from tokenmix_core.ops.types import ScanOutput

# lower bound of log-decays: its exponential is 0 in float32, and larger magnitudes would make cumulative sums less
# precise
LOWEST_DECAY = -110.0


@drops_padding("q", "k", "v", "g", "dt")
def recurrent_ssd_reference(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    *,
    dt: Float[Tensor, "B T HV"] | None = None,
    D: Float[Tensor, "HV"] | None = None,
    scale: float = 1.0,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
) -> ScanOutput:
    """Apply the recurrence token by token, in float32 (float64 for float64 inputs)."""
    return _with_steps(
        _recurrent, q=q, k=k, v=v, g=g, dt=dt, D=D, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
    )


@drops_padding("q", "k", "v", "g", "dt")
def chunk_ssd_reference(
    q: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    *,
    dt: Float[Tensor, "B T HV"] | None = None,
    D: Float[Tensor, "HV"] | None = None,
    scale: float = 1.0,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
) -> ScanOutput:
    """Apply SSD chunk by chunk: matmuls in the inputs' dtype, gates and states in float32 (float64 for float64)."""
    return _with_steps(
        _chunkwise, q=q, k=k, v=v, g=g, dt=dt, D=D, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
    )


def _with_steps(form, q, k, v, g, dt, D, scale, initial_state, cu_seqlens) -> ScanOutput:
    """Call the reference `form`, which has neither Δ nor D, with v scaled by Δ, and add D v to its outputs."""
    x = v if dt is None else (v * dt.unsqueeze(-1)).to(v.dtype)
    o, state = _by_sequence(form, q=q, k=k, v=x, g=g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return ScanOutput(o if D is None else (o + v * D.unsqueeze(-1)).to(v.dtype), state)


def _by_sequence(form, q, k, v, g, scale, initial_state, cu_seqlens) -> ScanOutput:
    """Call the reference `form` for each sequence of a packed batch, and join the results; once if unpacked."""
    if cu_seqlens is None:
        return form(q, k, v, g, scale, initial_state)
    boundaries = cu_seqlens.tolist()
    outputs, states = [], []
    for n, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        part = [x[:, begin:end] for x in (q, k, v, g)]
        o, state = form(*part, scale, None if initial_state is None else initial_state[n : n + 1])
        outputs.append(o)
        states.append(state)
    return ScanOutput(torch.cat(outputs, 1), torch.cat(states))


def _first_state(q: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    """Return the initial state as `[B, G, HV / G, K, V]`, zero if None, in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    shape = (q.shape[0], q.shape[2], v.shape[2] // q.shape[2], q.shape[3], v.shape[3])
    if initial_state is None:
        return torch.zeros(shape, dtype=dtype, device=q.device)
    return initial_state.to(dtype).reshape(shape)


def _recurrent(q, k, v, g, scale, initial_state) -> ScanOutput:
    state = _first_state(q, v, initial_state)
    T, G = q.shape[1], q.shape[2]
    q, k, decay = q.to(state.dtype), k.to(state.dtype), g.to(state.dtype).exp().unflatten(2, (G, -1))
    o = v.to(state.dtype).unflatten(2, (G, -1))
    outputs = []
    for t in range(T):
        update = torch.einsum("bgk,bghv->bghkv", k[:, t], o[:, t])
        state = decay[:, t, ..., None, None] * state + update
        outputs.append(scale * torch.einsum("bgk,bghkv->bghv", q[:, t], state))
    o = torch.stack(outputs, 1).flatten(2, 3).to(v.dtype) if T else v
    return ScanOutput(o, state.flatten(1, 2))


def _chunkwise(q, k, v, g, scale, initial_state, chunk_size: int = 64) -> ScanOutput:
    state = _first_state(q, v, initial_state)
    T, G = q.shape[1], q.shape[2]
    if T == 0:
        return ScanOutput(v, state.flatten(1, 2))
    chunk_size = min(chunk_size, T)
    pad = -T % chunk_size

    def chunks(x: Tensor) -> Tensor:
        # reshape [B, T, *, D] to [B, *, chunks, chunk_size, D]
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad))
        return x.unflatten(1, (-1, chunk_size)).movedim(3, 1)

    # shapes: q, k [B, G, NC, C, K]; v [B, G, R, NC, C, V]; cumulative decays b [B, G, R, NC, C]; R = HV / G heads per
    # group, NC chunks of C tokens
    q, k, v_ = chunks(q), chunks(k), chunks(v).unflatten(1, (G, -1))
    b = chunks(g.to(state.dtype).clamp(min=LOWEST_DECAY).unsqueeze(-1)).squeeze(-1).unflatten(1, (G, -1)).cumsum(-1)
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    decay = (b.unsqueeze(-1) - b.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
    scores = (scale * (q @ k.mT)).unsqueeze(2) * decay
    o = (scores.to(v.dtype) @ v_).to(state.dtype)
    to_end = (b[..., -1:] - b).exp().unsqueeze(-1)
    updates = (k.mT.unsqueeze(2) @ (v_ * to_end).to(v.dtype)).to(state.dtype)
    states = []
    for c in range(b.shape[3]):
        states.append(state)
        state = b[:, :, :, c, -1, None, None].exp() * state + updates[:, :, :, c]
    before = torch.stack(states, 3).to(v.dtype)
    o = o + scale * b.exp().unsqueeze(-1) * (q.unsqueeze(2) @ before)
    # reshape [B, G, R, NC, C, V] to [B, T, HV, V]
    o = o.flatten(1, 2).movedim(1, 3).flatten(1, 2)[:, :T].to(v.dtype)
    return ScanOutput(o, state.flatten(1, 2))


def ssd_step_reference(
    D: Float[Tensor, "HV"] | None,
    scale: float,
    q: Float[Tensor, "B G K"],
    k: Float[Tensor, "B G K"],
    v: Float[Tensor, "B HV V"],
    g: Float[Tensor, "B HV"],
    dt: Float[Tensor, "B HV"] | None,
    state: Float[Tensor, "B HV K V"],
) -> Float[Tensor, "B HV V"]:
    """Overwrite `state` with the state after one token; return the token's output."""
    one_token = (x.unsqueeze(1) for x in (q, k, v, g))
    dt = None if dt is None else dt.unsqueeze(1)
    o, new_state = recurrent_ssd_reference(*one_token, dt=dt, D=D, scale=scale, initial_state=state)
    state.copy_(new_state)
    return o.squeeze(1)
