"""Every Python block of every README is run: those of a file in their order, in one namespace, made small.

Sizes of models are lowered, and so is the number of tokens to generate, so that a block runs within seconds on a CPU;
nothing else is changed. Names that a reader would bring along are in `GIVEN`. A block that cannot run here is preceded
by `<!-- not run: REASON -->`, invisible to a reader, with one of the `REASONS`.
"""

import re
from pathlib import Path

import pytest
import torch

from tokenmix_core.nn import registry

ROOT = Path(__file__).parent.parent
REASONS = ("needs a GPU", "needs data")
_BLOCK = re.compile(r"(?ms)(?:^<!-- not run: ([^\n]*) -->\n+)?^```python[^\n]*\n(.*?)^```$")
SMALLER = (
    (r"hidden_size=\d+", "hidden_size=128"),
    (r"num_hidden_layers=\d+", "num_hidden_layers=8"),
    (r"intermediate_size=\d+", "intermediate_size=64"),
    (r"vocab_size=\d+", "vocab_size=300"),
    (r"max_new_tokens=\d+", "max_new_tokens=3"),
)
_MODELS = """
import torch
input_ids = prompt = torch.arange(12).view(1, 12)
borders = torch.tensor([0, 5, 12], dtype=torch.int32)
mask = torch.ones_like(input_ids)
"""
_TENSORS = """
import torch
B, T, H, K = 1, 12, 2, 64
q, k, v, q1, k1, v1 = (torch.randn(B, T, H, K) for _ in range(6))
g, beta = -torch.rand(B, T, H), torch.rand(B, T, H)
q1, k1, v1 = (x[:, 0] for x in (q1, k1, v1))
f = -torch.rand(B, T, H, 16)
f1 = f[:, 0]
"""
_PAPER = """
from tokenmix_core.modeling import *
from tokenmix_core.modeling import HybridModel
"""
GIVEN = {
    "README.md": _TENSORS + _MODELS,
    "packages/core/README.md": _TENSORS + _MODELS,
    "packages/core/src/tokenmix_core/modeling/README.md": _PAPER,
    "packages/lte/README.md": _MODELS,
    "packages/nats_l/README.md": _MODELS,
    "packages/nha/README.md": _TENSORS + _MODELS,
    "packages/oryx/README.md": _MODELS
    + "attends = mask.bool()\nchooses = lambda tokens: torch.ones_like(tokens, dtype=torch.bool)\n"
    + "evaluate = lambda model, *rest: model(input_ids)\n",
}


def documents():
    """The Markdown files of the workspace with Python in them."""
    folders = (ROOT.glob("*.md"), ROOT.glob("docs/*.md"), ROOT.glob("arena/*.md"), ROOT.glob("packages/**/*.md"))
    return sorted(
        path.relative_to(ROOT).as_posix() for group in folders for path in group if "```python" in path.read_text()
    )


@pytest.mark.parametrize("document", documents())
def test_the_blocks_of_a_document_run(document, monkeypatch):
    # a mixer of an example must not stay
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))
    torch.manual_seed(0)
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = list(_BLOCK.finditer(text))
    assert len(blocks) == text.count("```python")
    names: dict = {"__name__": "block"}
    exec(GIVEN.get(document, ""), names)
    for block in blocks:
        reason, code = block.groups()
        if reason is not None:
            assert reason in REASONS, f"{document}: {reason}"
            compile(code, document, "exec")
            continue
        for pattern, smaller in SMALLER:
            code = re.sub(pattern, smaller, code)
        line = text.count("\n", 0, block.start(2))
        # errors name the line of the document
        with torch.no_grad():
            exec(compile("\n" * line + code, document, "exec"), names)
