"""Plans go by the GPU at hand."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.kernels import tuning
from tokenmix_core.ops.gated_delta_rule import tuning as gated_delta_rule


@pytest.mark.parametrize("count", [66, 132])
def test_plans_fill_the_gpu_at_hand(count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "sm_count", lambda device: count)
    assert tuning.one_round() == count
    # a sequence with a head a SM stays whole, one with a head for half of the SMs is split in two segments
    assert gated_delta_rule.segment_tokens(1, count, 32768) == 0
    assert gated_delta_rule.segment_tokens(1, count // 2, 32768) == 16384
    assert gated_delta_rule.forward_columns(count // 2, 128) == 64
    assert gated_delta_rule.forward_columns(count, 128) == 128


def test_plans_without_a_gpu_are_those_of_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert tuning.one_round() == 132


def test_registers_are_capped_where_many_programs_wait():
    assert tuning.registers_of_many(8 * tuning.one_round(), 168) == 168
    assert tuning.registers_of_many(8 * tuning.one_round() - 1, 168) is None
