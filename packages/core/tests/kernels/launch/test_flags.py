"""Test that replays end if other tiles are selected, or if the user's switch disables them."""

import os
import subprocess
import sys

import pytest
import torch

from tokenmix_core.kernels import launch, tuning
from tokenmix_core.kernels.launch import caching, flags
from tokenmix_core.kernels.launch.cache.replay import Checked, Replayed
from tokenmix_core.ops.gated_delta_rule import tuning as gated_delta_rule
from tokenmix_core.ops.ssd import tuning as ssd


class Calls:
    """Calls of a cached sum and of a check; counts how often each one ran."""

    def __init__(self, add):
        self.add, self.sums, self.checks = add, 0, 0
        self.replayed, self.checked = Replayed(self._sum), Checked(self._check)

    def _sum(self, a, b):
        self.sums += 1
        out = torch.empty_like(a)
        self.add[(1,)](a, b, out, len(a))
        return out

    def _check(self, a):
        self.checks += 1

    def __call__(self):
        a, b = torch.randn(6), torch.randn(6)
        self.checked(a)
        torch.testing.assert_close(self.replayed(a, b), a + b)
        return self.sums, self.checks


@pytest.fixture
def call(add):
    return Calls(add)


@pytest.mark.parametrize(
    "change",
    [
        (tuning, {"one_wave": lambda *_: 1}),
        (gated_delta_rule, {"MOST_SAVED_BYTES": 0}),
        (ssd, {"STATE_STEPS": {}}),
        (ssd.STATE_STEPS, {0: gated_delta_rule.STATE_STEPS[0]}),
    ],
    ids=["function", "number", "table", "tile"],
)
def test_with_other_tiles_calls_are_run(call, change):
    assert [call(), call()] == [(1, 1)] * 2
    with tuning.override(*change):
        assert [call(), call()] == [(2, 2)] * 2
    # the calls work again with the old tiles
    assert [call(), call()] == [(3, 3)] * 2


def test_without_the_cache_every_call_is_run(call):
    assert [call(), call()] == [(1, 1)] * 2
    with caching(False):
        assert [call(), call()] == [(2, 2), (3, 3)]
        with caching(True):
            assert call() == (3, 3)
        assert call() == (4, 4)
    # earlier captures are still cached
    assert call() == (4, 4)
    with pytest.raises(RuntimeError, match="mine"), caching(False):
        raise RuntimeError("mine")
    assert call() == (4, 4)


def test_the_former_name_of_the_switch_is_accepted_with_the_new_one():
    with pytest.warns(FutureWarning, match="is now called caching"):
        assert launch.recording is caching


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True), (None, True)])
def test_an_environment_variable_disables_the_cache(value, on, monkeypatch):
    monkeypatch.delenv("TOKENMIX_RECORD", raising=False)
    if value is not None:
        monkeypatch.setenv("TOKENMIX_RECORD", value)
    assert flags.wanted() is on


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("TOKENMIX_RECORD", "off")
    with pytest.raises(ValueError, match=r"TOKENMIX_RECORD must be 0 .* or 1 .*, got 'off'"):
        flags.wanted()


def test_the_switch_is_imported_without_torch():
    script = """if True:
        import sys
        from tokenmix_core.kernels.launch import flags as switch, caching
        assert not switch.on
        assert "torch" not in sys.modules
    """
    environment = {**os.environ, "TOKENMIX_RECORD": "0"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=250, env=environment)
