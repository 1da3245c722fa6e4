"""Tests that tokens which training appends to rows (`modeling.lengths`) change neither the loss nor gradients."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.modeling import lengths
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.testing.closeness import relative_error


class LengthsContract:
    """Part of `ModelContract`, which provides the attributes and fixtures."""

    tokens: ClassVar[int]

    @pytest.mark.parametrize("form", ["rows", "row", "packed"])
    def test_appended_tokens_change_no_gradient(self, model, ids, form, monkeypatch):
        packed = form == "packed"
        boundaries = torch.tensor([0, 7, 7, self.tokens], dtype=torch.int32) if packed else None
        given: dict[str, Any] = {"cu_seqlens": boundaries} if packed else {}
        ids = ids if form == "rows" else ids[:1]

        def gradients() -> tuple[Tensor, dict[str, Tensor]]:
            # a fixed seed, so that dropout is equal in all calls
            torch.manual_seed(0)
            model.train().zero_grad()
            loss = model(ids, labels=ids, **given).loss
            loss.backward()
            return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

        loss, exact = gradients()
        monkeypatch.setattr(lengths, "on_gpu", lambda x: True)
        bounded = any(isinstance(x, Mixer) and x.bounds_more_tokens for x in model.modules())
        known = all(map(lengths.takes_more_tokens, model.modules())) and not (bounded and form == "rows")
        rounded, _, documents = lengths.round_up(model, ids, ids, boundaries)
        assert rounded.shape[1] == (lengths.rounded_length(self.tokens) if known else self.tokens)
        given_documents = 4 if packed else 0
        of_a_row = 2 if known and bounded else 0
        assert (0 if documents is None else len(documents)) == (given_documents + known if packed else of_a_row)
        again, found = gradients()
        assert relative_error(again, loss) < 1e-5
        assert found.keys() == exact.keys()
        for name in exact:
            assert relative_error(found[name], exact[name]) < 1e-4, name
