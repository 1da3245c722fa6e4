"""Test that tensors have the shapes and dtypes of the annotations, in a model with every kind of layer."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRONG = """
import torch
from tokenmix_core.nn.rotary import RotaryEmbedding


def test_wrong():
    RotaryEmbedding(8, {"rope_theta": 1e4})(torch.zeros(2, 3, 4, dtype=torch.int64))
"""


def test_annotations_hold_in_training_and_decoding_and_one_that_does_not_is_told(tmp_path):
    (tmp_path / "test_wrong.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "support.annotations", "-p", "no:cacheprovider",
         "tests/test_interleaving.py", str(tmp_path / "test_wrong.py"), "-k", "together or test_wrong"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert "1 failed, 3 passed" in done.stdout, done.stdout[-4000:]
    assert "TypeCheckError: Type-check error whilst checking the parameters of tokenmix_core.nn.rotary" in done.stdout
