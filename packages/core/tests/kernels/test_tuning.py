"""Test that plans depend on the GPU of this machine."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from tokenmix_core.kernels import tuning
from tokenmix_core.ops.gated_delta_rule import tuning as gated_delta_rule
from tokenmix_core.ops.ssd import tuning as ssd


@pytest.mark.parametrize("count", [66, 132])
def test_plans_fill_the_gpu_at_hand(count, monkeypatch, override):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    override(tuning, sm_count=lambda device: count)
    assert tuning.one_wave() == count
    # a sequence with a head a SM stays whole, one with a head for half of the SMs is split in two segments
    assert gated_delta_rule.segment_tokens(1, count, 32768) == 0
    assert gated_delta_rule.segment_tokens(1, count // 2, 32768) == 16384
    assert gated_delta_rule.forward_columns(count // 2, 128) == 64
    assert gated_delta_rule.forward_columns(count, 128) == 128


def test_plans_without_a_gpu_are_those_of_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert tuning.one_wave() == 132


def test_registers_are_capped_where_many_programs_wait():
    assert tuning.register_limit(8 * tuning.one_wave(), 168) == 168
    assert tuning.register_limit(8 * tuning.one_wave() - 1, 168) is None


def test_overridden_entries_return_after_an_error():
    before = dict(ssd.STATE_STEPS), tuning.one_wave
    with suppress(RuntimeError), tuning.override(ssd.STATE_STEPS, {0: None}), tuning.override(tuning, one_wave=None):
        assert ssd.STATE_STEPS[0] is None
        assert tuning.one_wave is None
        raise RuntimeError
    assert (ssd.STATE_STEPS, tuning.one_wave) == before


@pytest.mark.parametrize(("table", "words"), [(tuning, "kernels.tuning"), (ssd.STATE_STEPS, "the table")], ids=str)
def test_unknown_entries_are_refused(table, words):
    with pytest.raises(ValueError, match=f"'sdd' is not an entry of .*{words}"), tuning.override(table, {"sdd": {}}):
        pass
