"""Check that torch.export makes one program of a model for all lengths."""

from __future__ import annotations

from typing import Any

import torch


def check_exports(model: Any, *, strict: bool = False) -> None:
    """Assert that a model exported once, with rows of 70 tokens, has the model's logits at lengths from 3 to 200."""
    model.eval()
    draw = torch.Generator().manual_seed(0)
    few, many = (torch.randint(1, model.config.vocab_size, (2, n), generator=draw) for n in (70, 200))
    length = torch.export.Dim("length", min=2, max=4096)
    shapes: Any = {"input_ids": {1: length}, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(
            model, (), {"input_ids": few, "use_cache": False}, dynamic_shapes=shapes, strict=strict
        ).module()
        for ids in (few, many, many[:, :64], many[:, :65], few[:, :3]):
            got, expected = (run(input_ids=ids, use_cache=False).logits for run in (program, model))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
