"""Portable kernels compile for chips that we do not have: one call of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(900)
def test_one_call_of_each_kind_compiles_for_another_chip():
    done = subprocess.run([sys.executable, "tools/chips.py", "--quick"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
