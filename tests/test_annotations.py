"""The shapes and dtypes that annotations promise are those of the tensors, in a model with every layer there is."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = "tokenmix_core.testing.annotations"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )


def test_annotations_hold_in_training_and_decoding():
    done = run("tests/test_interleaving.py", "-k", "attention and gla and lte and mamba2 and oryx and nats_l")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "3 passed" in done.stdout


def test_an_annotation_that_does_not_hold_is_told(tmp_path):
    wrong = "import torch\nfrom tokenmix_core.nn.rotary import RotaryEmbedding\n\n\ndef test_wrong():\n"
    wrong += "    RotaryEmbedding(8, {'rope_theta': 1e4})(torch.zeros(1, 2, 3, 4, 5, dtype=torch.int64))\n"
    (tmp_path / "test_wrong.py").write_text(wrong)
    done = run(str(tmp_path / "test_wrong.py"))
    assert "TypeCheckError" in done.stdout, done.stdout[-2000:]
