"""Test rotary positions: angles equal those of transformers' models, and attention depends only on distances."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tokenmix_core.nn.rotary import RotaryEmbedding, Rotation, apply_rotary, apply_rotary_to_both
from tokenmix_core.testing.closeness import relative_error

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rotations_equal_transformers(kind):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters=dict(KINDS[kind]), max_position_embeddings=256
    )
    q, k = torch.randn(2, 9, 2, 32), torch.randn(2, 9, 2, 32)
    positions = torch.randint(0, 256, (2, 9))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    theirs = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    rotation = RotaryEmbedding(32, KINDS[kind], 256)(positions)
    for x, y in zip((q, k), theirs, strict=True):
        assert relative_error(apply_rotary(x, rotation).transpose(1, 2), y) < 1e-6


def test_scores_depend_on_distances_only():
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    table = RotaryEmbedding(16, KINDS["default"])

    def score(i, j):
        return (apply_rotary(q, table(torch.tensor([[i]]))) * apply_rotary(k, table(torch.tensor([[j]])))).sum()

    torch.testing.assert_close(score(5, 3), score(105, 103), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(score(5, 3), score(5, 4), rtol=1e-3)


def test_angles_stay_float32_in_bfloat16_and_autocast():
    positions = torch.arange(3000, 3008).unsqueeze(0)
    table = RotaryEmbedding(16, KINDS["default"])
    exact = table(positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = table.to(torch.bfloat16)(positions)
    assert torch.equal(again.cos, exact.cos)
    x = torch.randn(1, 8, 2, 16)
    narrow = apply_rotary(x.bfloat16(), exact)
    assert narrow.dtype == torch.bfloat16
    # the input and the result are each rounded once
    assert relative_error(narrow, apply_rotary(x, exact)) < 2 * 2**-8


@pytest.mark.parametrize(
    ("dim", "parameters", "message"), [(7, {}, "even and positive, got 7"), (8, {"rope_type": "dynamic"}, "'dynamic'")]
)
def test_invalid_parameters_raise(dim, parameters, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(dim, parameters)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_apply_rotary_to_both_equals_two_calls(tokens, rows):
    torch.manual_seed(0)
    angles = torch.rand(rows, tokens, 4)
    rotation = Rotation(angles.cos(), angles.sin())
    q, k = torch.randn(2, tokens, 3, 8), torch.randn(2, tokens, 6, 8)[:, :, ::2]
    got = apply_rotary_to_both(q, k, rotation)
    for x, y in zip((q, k), got, strict=True):
        torch.testing.assert_close(y, apply_rotary(x, rotation), rtol=0, atol=0)
