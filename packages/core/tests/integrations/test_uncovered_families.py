"""Test that each family of transformers that calls our operations runs our kernels, or that a message says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from tokenmix_core.integrations.transformers import FAMILIES, UNCOVERED, use_kernels

# functions of recurrent layers and classes of indexed attention, as a family's file defines them
DEFINITIONS = re.compile(
    r"^(?:def (?:causal_conv1d_fn|torch_chunk_gated_delta_rule|mamba2_chunk_scan)\b|class \w+Indexer\b)", re.MULTILINE
)


def test_families_that_are_not_covered_say_what_is_missing():
    from transformers import MambaConfig, MambaForCausalLM

    for family, missing in UNCOVERED.items():
        with pytest.raises(ValueError, match=rf"use_kernels: {family} needs {re.escape(missing)}.*no operation"):
            use_kernels(family)
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="use_kernels: mamba needs the selective scan of Mamba-1"):
        use_kernels(model)


def test_every_family_with_such_layers_is_covered_or_named():
    files = [*Path(transformers.__file__).parent.glob("models/*/modeling_*.py")]
    found = {x.parent.name for x in files if DEFINITIONS.search(x.read_text())}
    assert "qwen3_next" in found
    assert found - FAMILIES.keys() - UNCOVERED.keys() == set()
