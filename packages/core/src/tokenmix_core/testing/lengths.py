"""Tests that the tokens which training appends (`modeling.lengths`) change neither the loss nor gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.modeling import lengths
from tokenmix_core.testing.closeness import relative_error


class LengthsContract:
    """Part of `ModelContract`, which provides the attributes and fixtures."""

    tokens: ClassVar[int]

    @pytest.mark.parametrize("packed", [False, True])
    def test_appended_tokens_change_no_gradient(self, model, ids, packed, monkeypatch):
        boundaries = torch.tensor([0, 7, 7, self.tokens], dtype=torch.int32) if packed else None
        given: dict[str, Any] = {"cu_seqlens": boundaries} if packed else {}
        ids = ids[:1] if packed else ids

        def gradients() -> tuple[Tensor, dict[str, Tensor]]:
            # seeded, so that dropout is the same in all calls
            torch.manual_seed(0)
            model.train().zero_grad()
            loss = model(ids, labels=ids, **given).loss
            loss.backward()
            return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

        loss, exact = gradients()
        monkeypatch.setattr(lengths, "on_gpu", lambda x: True)
        known = all(map(lengths.takes_more_tokens, model.modules()))
        rounded, _, documents = lengths.round_up(model, ids, ids, boundaries)
        assert rounded.shape[1] == (32 if known else self.tokens)
        assert documents is None or len(documents) == (5 if known else 4)
        again, found = gradients()
        assert relative_error(again, loss) < 1e-5
        assert found.keys() == exact.keys()
        for name in exact:
            assert relative_error(found[name], exact[name]) < 1e-4, name
