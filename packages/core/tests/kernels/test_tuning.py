"""Plans go by the GPU at hand."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.kernels import tuning


@pytest.mark.parametrize("count", [66, 132])
def test_plans_fill_the_gpu_at_hand(count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "SMs", lambda device: count)
    assert tuning.one_round() == count
    # a sequence with a head a SM is walked whole, one with a head for half of them in two pieces
    assert tuning.gated_delta_rule_segment(1, count, 32768) == 0
    assert tuning.gated_delta_rule_segment(1, count // 2, 32768) == 16384
    assert tuning.gated_delta_rule_columns(count // 2, 128) == 64
    assert tuning.gated_delta_rule_columns(count, 128) == 128


def test_plans_without_a_gpu_are_those_of_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert tuning.one_round() == 132


def test_registers_are_capped_where_many_programs_wait():
    assert tuning.registers_of_many(8 * tuning.one_round(), 168) == 168
    assert tuning.registers_of_many(8 * tuning.one_round() - 1, 168) is None
