"""Test that our functions with FLA's signatures agree with FLA's definitions."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from tokenmix_core.integrations import fla
from tokenmix_core.testing.closeness import relative_error

B, T, H, HV, K, V = 2, 21, 2, 4, 12, 10
BOUNDARIES = torch.tensor([0, 5, 5, 17, 21])


def defined(q, k, v, g, beta, scale=None, state=None):
    """Compute the gated delta rule token by token; without beta, simple GLA. The state is `[B, HV, K, V]`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state = q.new_zeros(q.shape[0], v.shape[2], q.shape[-1], v.shape[-1]) if state is None else state
    o = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        write = v[:, t]
        if beta is not None:
            write = beta[:, t, :, None] * (write - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
        o.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(o, 1) if o else v, state


def inputs(batch=B, key=K, value=V, tokens=T, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = draw(batch, tokens, H, key), F.normalize(draw(batch, tokens, H, key), dim=-1)
    v, g = draw(batch, tokens, HV, value), F.logsigmoid(draw(batch, tokens, HV))
    beta = draw(batch, tokens, HV).sigmoid()
    state = draw(batch, HV, key, value)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def close(got, expected, tolerance=1e-12):
    for name, x, y in zip(("o", "final_state"), got, expected, strict=True):
        assert relative_error(x, y) < tolerance, name


RULES = pytest.mark.parametrize("rule", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])


@RULES
def test_delta_rule_equals_the_definition_with_states(rule):
    q, k, v, g, beta, state = inputs()
    got = rule(q, k, v, g=g, beta=beta, scale=0.3, initial_state=state, output_final_state=True)
    close(got, defined(q, k, v, g, beta, 0.3, state))
    assert rule(q, k, v, g=g, beta=beta)[1] is None


@RULES
def test_options_for_gates_and_normalisation(rule):
    q, k, v, g, beta, _ = inputs()
    q, k = 3 * q, 2 * k
    raw, logits = g + 1, beta - 0.5
    A_log, dt_bias = torch.linspace(0, 1, HV).double(), torch.linspace(-1, 1, HV).double()
    got = rule(
        q, k, v, g=raw, beta=logits, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
    )  # fmt: skip
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
    close(got, defined(*unit, v, -A_log.exp() * F.softplus(raw + dt_bias), 2 * logits.sigmoid()))


@RULES
def test_state_v_first_and_head_first(rule):
    q, k, v, g, beta, state = inputs()
    o, final = defined(q, k, v, g, beta, state=state)
    got = rule(q, k, v, g=g, beta=beta, initial_state=state.mT, output_final_state=True, state_v_first=True)
    close(got, (o, final.mT))
    swapped = [x.transpose(1, 2) for x in (q, k, v, g, beta)]
    named = dict(zip(("q", "k", "v", "g", "beta"), swapped, strict=True))
    got = rule(**named, initial_state=state, output_final_state=True, head_first=True)
    close(got, (o.transpose(1, 2), final))


@pytest.mark.parametrize("rule", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_simple_gla"])
def test_packed_sequences_equal_separate_ones(rule):
    q, k, v, g, beta, state = inputs(batch=1)
    written = {} if rule == "chunk_simple_gla" else {"beta": beta}
    state = torch.cat([state, 2 * state, -state, state / 2])
    got = getattr(fla, rule)(
        q, k, v, g=g, **written, initial_state=state, output_final_state=True, cu_seqlens=BOUNDARIES
    )
    outputs, states = [], []
    for n, (a, b) in enumerate(zip(BOUNDARIES.tolist(), BOUNDARIES.tolist()[1:], strict=False)):
        part = [x[:, a:b] for x in (q, k, v, g)]
        o, after = defined(*part, beta[:, a:b] if written else None, state=state[n : n + 1])
        outputs.append(o)
        states.append(after)
    close(got, (torch.cat(outputs, 1), torch.cat(states)))


def test_simple_gla_decay_per_token_per_head_or_none():
    q, k, v, g, _, state = inputs()
    got = fla.chunk_simple_gla(q, k, v, g, scale=0.2, initial_state=state, output_final_state=True)
    close(got, defined(q, k, v, g, None, 0.2, state))
    gamma = torch.linspace(-1, -0.1, HV).double()
    got = fla.chunk_simple_gla(q, k, v, g_gamma=gamma, output_final_state=True, state_v_first=True)
    o, final = defined(q, k, v, gamma.expand(B, T, HV), None)
    close(got, (o, final.mT))
    got = fla.chunk_simple_gla(q, k, v, output_final_state=True)
    close(got, defined(q, k, v, torch.zeros_like(g), None))
    assert fla.chunk_simple_gla(q, k, v, g)[1] is None


def test_missing_gates_mean_no_decay_and_full_write():
    q, k, v, _, _, _ = inputs()
    got = fla.fused_recurrent_gated_delta_rule(q, k, v, output_final_state=True)
    nothing = torch.zeros(B, T, HV).double()
    close(got, defined(q, k, v, nothing, nothing + 1))


@pytest.mark.parametrize("rule", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_simple_gla"])
def test_gradients_reach_every_tensor(rule):
    q, k, v, g, beta, state = inputs(tokens=9)
    tensors = {"q": q, "k": k, "v": v, "g": g, "state": state} | ({} if rule == "chunk_simple_gla" else {"beta": beta})

    def gradients(run):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        o, final = run(**leaves)
        (o.sin().sum() + final.cos().sum()).backward()
        return {n: x.grad for n, x in leaves.items()}

    ours = gradients(lambda state, **x: getattr(fla, rule)(**x, initial_state=state, output_final_state=True))
    theirs = gradients(lambda state, beta=None, **x: defined(**x, beta=beta, state=state))
    for name, x in ours.items():
        assert relative_error(x, theirs[name]) < 1e-10, name


@pytest.mark.parametrize("rule", ["chunk_gated_delta_rule", "chunk_simple_gla"])
def test_unsupported_head_sizes_are_fitted(rule):
    q, k, v, g, beta, state = inputs(batch=1, key=24, value=96, tokens=7, dtype=torch.float32)
    written = {} if rule == "chunk_simple_gla" else {"beta": beta}
    got = getattr(fla, rule)(q, k, v, g=g, **written, initial_state=state, output_final_state=True, impl="triton")
    exact = [x.double() for x in (q, k, v, g)]
    close(got, defined(*exact, beta.double() if written else None, state=state.double()), 1e-5)


def refused(message, call, *args, **kwargs):
    with pytest.raises(ValueError, match=message):
        call(*args, **kwargs)


def test_unsupported_options_raise():
    q, k, v, g, beta, _ = inputs()
    chunk, recurrent = fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule
    refused("cp_context is not available", chunk, q, k, v, g, beta, cp_context=object())
    refused("no option 'fast'", chunk, q, k, v, g, beta, fast=True)
    refused("use_gate_in_kernel=True needs g and A_log", chunk, q, k, v, g, beta, use_gate_in_kernel=True)
    refused("A_log and dt_bias require", chunk, q, k, v, g, beta, dt_bias=g[0, 0])
    refused("allow_neg_eigval=True requires", chunk, q, k, v, g, beta, allow_neg_eigval=True)
    refused("gk is not available", recurrent, q, k, v, g, beta)
    refused("beta must have shape", recurrent, q, k, v, g, beta=v)
    refused("exclude each other", fla.chunk_simple_gla, q, k, v, g, g[0, 0])


@pytest.mark.parametrize("boundaries", [None, BOUNDARIES])
def test_a_reversed_scan_is_one_of_flipped_tokens(boundaries):
    q, k, v, g, _, state = inputs(1)
    rows = slice(None)
    if boundaries is not None:
        state, rows = torch.cat([state, 2 * state, -state, state / 2]), [3, 2, 1, 0]
    got = fla.fused_recurrent_simple_gla(
        q, k, v, g, scale=0.2, initial_state=state, output_final_state=True, reverse=True, cu_seqlens=boundaries
    )
    flipped = None if boundaries is None else T - boundaries.flip(0)
    o, after = fla.chunk_simple_gla(
        *(x.flip(1) for x in (q, k, v, g)), scale=0.2, initial_state=state[rows], output_final_state=True,
        cu_seqlens=flipped,
    )  # fmt: skip
    close(got, (o.flip(1), after[rows]))


def test_short_names_and_recurrent_simple_gla():
    assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule
    q, k, v, g, _, state = inputs()
    got = fla.fused_recurrent_simple_gla(q, k, v, g, scale=0.2, initial_state=state, output_final_state=True)
    close(got, defined(q, k, v, g, None, 0.2, state))


@pytest.mark.parametrize(
    "name",
    ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_simple_gla", "fused_recurrent_simple_gla"],
)
def test_the_old_name_of_the_states_layout_warns(name):
    q, k, v, g, beta, state = inputs()
    given = {"g": g} | ({} if "simple" in name else {"beta": beta})
    with pytest.warns(DeprecationWarning, match="now called state_v_first"):
        got = getattr(fla, name)(
            q, k, v, **given, initial_state=state.mT, output_final_state=True, transpose_state_layout=True
        )
    close((got[0], got[1].mT), defined(q, k, v, g, given.get("beta"), state=state))
    with pytest.raises(ValueError, match="not both"):
        getattr(fla, name)(q, k, v, **given, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("name", ["chunk_gdn", "fused_recurrent_gdn", "chunk_simple_gla", "fused_recurrent_simple_gla"])
def test_float32_queries_and_keys_beside_16_bit_values(name):
    q, k, v, g, beta, _ = inputs()
    given = {"g": g.float()} | ({} if "simple" in name else {"beta": beta.float()})
    o = getattr(fla, name)(q.float(), k.float(), v.half(), **given)[0]
    assert o.dtype == torch.float16
    assert relative_error(o.double(), defined(q, k, v, g, beta if "beta" in given else None)[0]) < 5e-3


def test_tuning_options_are_ignored():
    q, k, v, g, beta, _ = inputs()
    steered = fla.chunk_gated_delta_rule(
        q, k, v, g, beta, chunk_size=32, cu_seqlens_cpu=BOUNDARIES, chunk_indices=BOUNDARIES
    )
    assert torch.equal(steered[0], fla.chunk_gated_delta_rule(q, k, v, g, beta)[0])


def test_positional_arguments_have_the_order_of_fla():
    """Test that positional arguments have the order of fla-core 0.6."""
    expected = "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel"
    assert " ".join(inspect.signature(fla.fused_recurrent_gated_delta_rule).parameters).startswith(expected)
    expected = "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel"
    assert " ".join(inspect.signature(fla.chunk_gated_delta_rule).parameters).startswith(expected)
    expected = "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens"
    assert " ".join(inspect.signature(fla.chunk_simple_gla).parameters).startswith(expected)
