"""The gated delta rule in eager PyTorch: token by token (the specification) and chunkwise (used on CPUs).

Both take any head size and device, compute in float32 (float64 for float64 inputs), and are differentiated by autograd.
README.md derives the chunkwise form.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.ops.padding import drops_padding

# lower bound of log-decays: its exponential is 0 in float32, and larger magnitudes would make cumulative sums less
# precise
MIN_LOG_DECAY = -110.0


def l2_normalise(x: Tensor) -> Tensor:
    """Return x · rsqrt(Σ x² + 1e−6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@drops_padding("q", "k", "v", "g", "beta")
def recurrent_reference(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    scale: float,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    qk_l2norm: bool = False,
    writes: Float[Tensor, "B slots HV"] | None = None,
    write_chunk: int = 64,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """Apply the recurrence token by token; return outputs in v's dtype, and the final states.

    The arguments are those of `chunk_gated_delta_rule`.
    """
    if cu_seqlens is not None:
        boundaries = cu_seqlens.tolist()
        parts = [
            recurrent_reference(
                *(x[:, start:end] for x in (q, k, v, g, beta)),
                scale,
                None if initial_state is None else initial_state[n : n + 1],
                qk_l2norm=qk_l2norm,
                writes=None if writes is None else writes[:, start // write_chunk + n :],
                write_chunk=write_chunk,
            )
            for n, (start, end) in enumerate(pairwise(boundaries))
        ]
        outputs, states = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(states, 0)

    dtype = torch.promote_types(torch.promote_types(q.dtype, g.dtype), torch.float32)
    group = v.shape[2] // q.shape[2]
    out_dtype = v.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    if initial_state is None:
        state = q.new_zeros(q.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    else:
        state = initial_state.to(dtype)

    # `bare` is the state without the writes of the `write_chunk` tokens that share token t's factor
    outputs, bare = [], state
    for t in range(q.shape[1]):
        if writes is not None and t % write_chunk == 0:
            state = bare = state if t == 0 else _gate_writes(state, bare, writes[:, t // write_chunk - 1], dtype)
        decay = g[:, t, :, None, None].exp()
        state, bare = state * decay, bare * decay
        seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        update = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * update[:, :, None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    if writes is not None and outputs:
        state = _gate_writes(state, bare, writes[:, (len(outputs) - 1) // write_chunk], dtype)
    o = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return o.to(out_dtype), state.to(torch.promote_types(torch.float32, dtype))


def _gate_writes(state: Tensor, bare: Tensor, write: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `bare`, the state after a chunk without its writes, plus the factor `write [N, ...]` times its writes."""
    return bare + write.to(dtype)[..., None, None] * (state - bare)


@drops_padding("q", "k", "v", "g", "beta")
def chunk_reference(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    scale: float,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    qk_l2norm: bool = False,
    writes: Float[Tensor, "B slots HV"] | None = None,
    write_chunk: int = 64,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"]]:
    """Apply the chunkwise form: batched matmuls over all chunks at once, then a loop over chunks for the states.

    Sequences, packed or not, are cut into chunks `[chunks, heads, C, size]`, sorted by their index in the sequence:
    first chunks, second chunks, etc. Partial chunks are padded with tokens that leave the state unchanged.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    dtype = torch.promote_types(torch.promote_types(q.dtype, g.dtype), torch.float32)
    out_dtype, device = v.dtype, q.device
    boundaries = cu_seqlens.tolist() if cu_seqlens is not None else range(0, B * T + 1, T)
    index, steps = _chunks(list(boundaries), min(chunk_size, max(16, next_power_of_2(T))), device)
    chunks, C = index.shape

    def gather(x: Tensor) -> Tensor:
        # padding tokens have the index B · T, that of an extra row of zeros after the last token
        x = torch.nn.functional.pad(x.reshape(B * T, *x.shape[2:]).to(dtype), (0, 0) * (x.dim() - 2) + (0, 1))
        return x[index].movedim(2, 1)

    # the head axis of q and k becomes [H, 1], that of v and the gates [H, HV / H], so that matmuls broadcast
    q, k = gather(q).unsqueeze(2), gather(k).unsqueeze(2)
    v, g, beta = (gather(x).unflatten(1, (H, HV // H)) for x in (v, g, beta))
    if qk_l2norm:
        q, k = l2_normalise(q), l2_normalise(k)

    b = g.clamp(min=MIN_LOG_DECAY).cumsum(-1)
    gamma, rest = b.exp().unsqueeze(-1), (b[..., -1:] - b).exp().unsqueeze(-1)
    lower = torch.ones(C, C, dtype=torch.bool, device=device).tril()
    decay = (b.unsqueeze(-1) - b.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp() * beta.unsqueeze(-2)
    system = (k @ k.mT * decay).tril(-1)
    solved = torch.linalg.solve_triangular(system, torch.cat([v, (gamma * k)], -1), upper=False, unitriangular=True)
    fresh, seen = solved.split([V, K], -1)
    write = (k * rest * beta.unsqueeze(-1)).mT
    last = gamma[..., -1:, :]

    N = len(boundaries) - 1
    state = q.new_zeros(N, H, HV // H, K, V) if initial_state is None else initial_state.to(dtype).unflatten(1, (H, -1))
    entering, residual, first = [], [], 0
    # for `writes`: `bare` is the state without the writes of the chunks that share a factor; `share` is this factor
    bare, share = state, state.new_ones(state.shape[:3])
    for step, active in enumerate(steps):
        here = slice(first, first + len(active))
        whole = len(active) == N
        s = state if whole else state[active]
        if writes is not None and step * C % write_chunk == 0:
            s = _gate_writes(s, bare[active], share[active], dtype)
            bare = bare.index_copy(0, active, s)
            now = _shares(writes, boundaries, active, step * C // write_chunk, write_chunk)
            share = share.index_copy(0, active, now.unflatten(1, (H, -1)).to(dtype))
        r = fresh[here] - seen[here] @ s
        entering.append(s)
        residual.append(r)
        s = last[here] * s + write[here] @ r
        state = s if whole else state.index_copy(0, active, s)
        if writes is not None:
            bare = bare.index_copy(0, active, last[here] * bare[active])
        first += len(active)
    if writes is not None:
        state = _gate_writes(state, bare, share, dtype)

    if chunks:
        r, s = torch.cat(residual), torch.cat(entering)
        out = scale * (gamma * (q @ s) + (q @ k.mT * decay) @ r)
        flat = out.new_zeros(B * T + 1, HV, V).index_copy(
            0, index.flatten(), out.flatten(1, 2).movedim(1, 2).flatten(0, 1)
        )
        o = flat[:-1].view(B, T, HV, V)
    else:
        o = torch.zeros(B, T, HV, V, dtype=dtype, device=device)
    return o.to(out_dtype), state.flatten(1, 2)


def _shares(writes: Tensor, boundaries: Sequence[int], active: Tensor, chunk: int, write_chunk: int) -> Tensor:
    """Return `[active, HV]`: for each sequence in `active`, the write factor of its chunk with index `chunk`."""
    if len(writes) > 1:
        return writes[active, chunk]
    # a single row, packed or not: the factors of sequence n begin at index starts[n] // write_chunk + n
    starts = torch.tensor(list(boundaries), device=active.device)[active]
    return writes[0, starts // write_chunk + active + chunk]


def _chunks(boundaries: list[int], C: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return token indices `[chunks, C]` (padding: the token count), and for each i the sequences that have chunk i."""
    # Python integers, because torch.compile can trace them
    lengths = [end - start for start, end in pairwise(boundaries)]
    rows, steps = [torch.empty(0, C, dtype=torch.long)], []
    for first in range(0, max(lengths), C):
        active = [n for n, length in enumerate(lengths) if length > first]
        at = torch.tensor([[boundaries[n] + first] for n in active]) + torch.arange(C)
        rows.append(at.masked_fill(at >= torch.tensor([[boundaries[n + 1]] for n in active]), boundaries[-1]))
        steps.append(torch.tensor(active).to(device))
    return torch.cat(rows).to(device), steps
