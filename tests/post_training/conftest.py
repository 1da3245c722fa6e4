"""Fixtures of tests with TRL, peft and torchao on a CPU."""

import importlib.util

import pytest
from tests.post_training.models import MODELS

from tokenmix_core.data.tokenizer import byte_tokenizer

# without TRL there is nothing to collect, which pytest reports as a failure
collect_ignore_glob = [] if importlib.util.find_spec("trl") else ["test_*.py"]


@pytest.fixture(scope="session")
def tokenizer():
    """Return the byte tokenizer, for which the end token that TRL appends to texts is a single token."""
    made = byte_tokenizer()
    made.split_special_tokens = False
    return made


@pytest.fixture(params=MODELS)
def mixer(request):
    """Return the name of a mixer."""
    return request.param


@pytest.fixture
def settings(tmp_path):
    """Return arguments of a TRL configuration: two steps on a CPU in float32, each logged."""
    return {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
