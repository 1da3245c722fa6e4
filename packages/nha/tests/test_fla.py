"""FLA's signatures of gated slot attention and gated linear attention agree with their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokenmix_core.testing.closeness import relative_error
from tokenmix_nha.fla import (
    _warn_of_speed,
    chunk_gla,
    chunk_gsa,
    fused_chunk_gla,
    fused_recurrent_gla,
    fused_recurrent_gsa,
)

B, T, H, HQ, K, V, M = 2, 19, 2, 4, 8, 6, 5
BOUNDARIES = torch.tensor([0, 4, 4, 15, 19])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def gsa(q, k, v, s, g, scale=None, state=None):
    """Compute Zhang et al. 2024, eq. 9 and 10, token by token, with FLA's states."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeats = q.shape[2] // k.shape[2]
    hk, hv = (q.new_zeros(q.shape[0], k.shape[2], *x) for x in ((K, M), (M, V))) if state is None else state
    o = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        hk = hk * decay.unsqueeze(-2) + k[:, t].unsqueeze(-1) * s[:, t].unsqueeze(-2)
        hv = hv * decay.unsqueeze(-1) + s[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        keys, values = (x.repeat_interleave(repeats, 1) for x in (hk, hv))
        share = (scale * torch.einsum("bhk,bhkm->bhm", q[:, t], keys)).softmax(-1)
        o.append(torch.einsum("bhm,bhmv->bhv", share, values))
    return (torch.stack(o, 1) if o else q.new_zeros(*q.shape[:3], V)), (hk, hv)


def gla(q, k, v, g, scale=None, state=None):
    scale = K**-0.5 if scale is None else scale
    state = q.new_zeros(q.shape[0], H, K, V) if state is None else state
    o = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(o, 1), state


def inputs(batch=B):
    g = F.logsigmoid(draw(batch, T, H, M, seed=3)) / 2
    return draw(batch, T, HQ, K), draw(batch, T, H, K, seed=1), draw(batch, T, H, V, seed=2), 1 - g.exp(), g


def states(batch):
    return draw(batch, H, K, M, seed=4), draw(batch, H, M, V, seed=5)


def close(got, expected):
    assert relative_error(got[0], expected[0]) < 1e-9
    for x, y in zip(got[1], expected[1], strict=True):
        assert relative_error(x, y) < 1e-9


def test_gsa_with_initial_and_final_states_agrees_with_the_definition():
    q, k, v, s, g = inputs()
    close(chunk_gsa(q, k, v, s, g, 0.7, states(B), True), gsa(q, k, v, s, g, 0.7, states(B)))
    close(chunk_gsa(q, k, v, None, g, output_final_state=True), gsa(q, k, v, s, g))
    assert chunk_gsa(q, k, v, s, g)[1] == (None, None)
    assert chunk_gsa(q, k, v, 2 * s, g)[1] == (None, None)


def test_heads_may_come_before_tokens():
    q, k, v, s, g = inputs()
    o = chunk_gsa(*(x.transpose(1, 2) for x in (q, k, v, s, g)), head_first=True)[0]
    assert relative_error(o.transpose(1, 2), gsa(q, k, v, s, g)[0]) < 1e-9


@pytest.mark.parametrize(("abc", "factor"), [(False, 1), (False, 2), (True, 1)])
def test_packed_sequences_equal_separate_calls(abc, factor):
    q, k, v, s, g = inputs(1)
    s = factor * s
    logits = draw(1, T, H, M, seed=7)
    got = chunk_gsa(q, k, v, logits, None, output_final_state=True, cu_seqlens=BOUNDARIES) if abc else chunk_gsa(
        q, k, v, s, g, None, states(4), True, cu_seqlens=BOUNDARIES
    )  # fmt: skip
    o, hk, hv = [], [], []
    for n, (a, b) in enumerate(zip(BOUNDARIES.tolist(), BOUNDARIES.tolist()[1:], strict=False)):
        part = [x[:, a:b] for x in (q, k, v)]
        if abc:
            alone = gsa(*part, *abc_weights(logits[:, a:b]))
        else:
            alone = gsa(*part, s[:, a:b], g[:, a:b], state=[x[n : n + 1] for x in states(4)])
        o.append(alone[0])
        hk.append(alone[1][0])
        hv.append(alone[1][1])
    close(got, (torch.cat(o, 1), (torch.cat(hk), torch.cat(hv))))


def abc_weights(s):
    """Return s and g of attention with bounded-memory control (Peng et al. 2022) in FLA's form."""
    z = s.logcumsumexp(1)
    return (s - z).exp(), torch.cat((z[:, :1], z[:, :-1]), 1) - z


def test_without_g_slots_are_sums_weighted_by_s():
    q, k, v, _, _ = inputs()
    s = draw(B, T, H, M, seed=7)
    close(chunk_gsa(q, k, v, s, output_final_state=True), gsa(q, k, v, *abc_weights(s)))


@pytest.mark.parametrize("factor", [1, -3])
def test_gradients_through_s_and_g_agree_with_the_definition(factor):
    q, k, v, _, g = inputs()

    def gradients(run):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, *states(B))]
        *tokens, hk, hv = leaves
        o, final = run(*tokens[:3], factor * (1 - tokens[3].exp()), tokens[3], (hk, hv))
        (o.sin().sum() + sum(x.cos().sum() for x in final)).backward()
        return [x.grad for x in leaves]

    ours = gradients(lambda *x: chunk_gsa(*x[:5], initial_state=x[5], output_final_state=True))
    defined = gradients(lambda *x: gsa(*x[:5], state=x[5]))
    for x, y in zip(ours, defined, strict=True):
        assert relative_error(x, y) < 1e-8


def test_chunk_gla_accepts_all_options():
    q, k, v, _, _ = inputs()
    q, g = q[:, :, :H], F.logsigmoid(draw(B, T, H, K, seed=9))
    state = draw(B, H, K, V, seed=6)
    o, final = gla(q, k, v, g, 0.4, state)
    got = chunk_gla(q, k, v, g, 0.4, state, True)
    assert relative_error(got[0], o) < 1e-12
    assert relative_error(got[1], final) < 1e-12
    first = [x.transpose(1, 2) for x in (q, k, v, g)]
    got = chunk_gla(*first, 0.4, state.mT, True, state_v_first=True, head_first=True)
    assert relative_error(got[0], o.transpose(1, 2)) < 1e-12
    assert relative_error(got[1], final.mT) < 1e-12
    assert chunk_gla(q, k, v, g)[1] is None


def test_unsupported_arguments_are_refused_with_the_reason():
    q, k, v, s, g = inputs()
    for message, arguments in {
        "got neither": (None, None),
        "there can be no initial_state": (s, None, None, states(B)),
        "must be the pair": (s, g, None, states(B)[0]),
        "hk must have shape": (s, g, None, states(B)[::-1]),
    }.items():
        with pytest.raises(ValueError, match=message):
            chunk_gsa(q, k, v, *arguments)
    with pytest.raises(ValueError, match="gv is not available"):
        fused_recurrent_gla(q[:, :, :H], k, v, gv=v)
    with pytest.raises(ValueError, match="no option 'fast'"):
        chunk_gsa(q, k, v, s, g, fast=1)


def test_any_weights_warn_of_their_speed():
    q, k, v, s, g = inputs()
    _warn_of_speed.cache_clear()
    with pytest.warns(UserWarning, match=r"s is not 1 - exp\(g\)"):
        chunk_gsa(q, k, v, s + 0.1, g)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("factor", [1, 2])
def test_a_reversed_scan_is_one_of_flipped_tokens(packed, factor):
    q, k, v, s, g = inputs(1 if packed else B)
    s, (hk, hv) = factor * s, states(4 if packed else B)
    boundaries, rows = (BOUNDARIES, [3, 2, 1, 0]) if packed else (None, slice(None))
    got = fused_recurrent_gsa(q, k, v, s, g, None, (hk, hv), True, True, boundaries)
    flipped = None if boundaries is None else T - boundaries.flip(0)
    o, after = chunk_gsa(*(x.flip(1) for x in (q, k, v, s, g)), None, (hk[rows], hv[rows]), True, cu_seqlens=flipped)
    close(got, (o.flip(1), [x[rows] for x in after]))
    gk, state = F.logsigmoid(draw(*k.shape, seed=9)), draw(len(hk), H, K, V, seed=6)
    q = q[:, :, :H]
    o, final = fused_recurrent_gla(q, k, v, gk, None, 0.4, state, True, True, False, boundaries)
    tokens = (x.flip(1) for x in (q, k, v, gk))
    wanted, after = chunk_gla(*tokens, 0.4, state[rows], True, cu_seqlens=flipped)
    close((o, (final,)), (wanted.flip(1), (after[rows],)))


def test_recurrent_names_compute_what_the_chunked_ones_do():
    q, k, v, s, g = inputs()
    close(fused_recurrent_gsa(q, k, v, s, g, 0.7, states(B), True), gsa(q, k, v, s, g, 0.7, states(B)))
    assert fused_chunk_gla is chunk_gla
    q = q[:, :, :H]
    o, final = fused_recurrent_gla(q, k, v)
    assert relative_error(o, gla(q, k, v, torch.zeros_like(k))[0]) < 1e-12
    assert final is None


def test_the_old_name_of_the_states_layout_warns():
    q, k, v, _, _ = inputs()
    q, g, state = q[:, :, :H], F.logsigmoid(draw(B, T, H, K, seed=9)), draw(B, H, K, V, seed=6)
    for run in (chunk_gla, fused_recurrent_gla):
        with pytest.warns(DeprecationWarning, match="now called state_v_first"):
            got = run(q, k, v, g, initial_state=state.mT, output_final_state=True, transpose_state_layout=True)
        assert relative_error(got[1], gla(q, k, v, g, state=state)[1].mT) < 1e-12
        with pytest.raises(ValueError, match="not both"):
            run(q, k, v, g, state_v_first=True, transpose_state_layout=True)


def test_float32_queries_and_keys_beside_16_bit_values():
    q, k, v, s, g = inputs()
    mixed = q.float(), k.float(), v.half(), s.float(), g.float()
    for arguments in (mixed, (*mixed[:3], 2 * mixed[3], mixed[4])):
        o = chunk_gsa(*arguments)[0]
        assert o.dtype == torch.float16
        assert relative_error(o.double(), gsa(q, k, v, arguments[3].double(), g)[0]) < 3e-3


def test_s_and_g_rounded_to_bfloat16_count_as_equal():
    q, k, v, _, g = (x.bfloat16() for x in inputs())
    assert chunk_gsa(q, k, v, 1 - g.exp(), g)[0].dtype == torch.bfloat16
