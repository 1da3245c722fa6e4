"""Contract of folders that an earlier version wrote: they load, give equal results, and training continues.

A folder of fixtures holds `model/` with its results in `expected.safetensors`, a token file in `tokens/`, a run that
was killed after its checkpoint in `interrupted/`, and the log of the same run without the kill in `metrics.jsonl`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch


class SavedContract:
    """Tests of one folder of fixtures. A subclass `TestX(SavedContract)` sets the attributes.

    Attributes:
        folder: the folder of fixtures.
        main: the package's command line, as `staticmethod`.
    """

    folder: ClassVar[Path]
    main: ClassVar[Callable[..., int]]

    @pytest.fixture
    def saved(self, tmp_path, monkeypatch) -> Path:
        """Return a copy of the fixtures, which becomes the working directory."""
        copy = shutil.copytree(self.folder, tmp_path / "saved")
        monkeypatch.chdir(copy)
        return copy

    def test_a_saved_model_gives_the_same_logits_and_tokens(self, saved):
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        expected = load_file(saved / "expected.safetensors")
        model: Any = AutoModelForCausalLM.from_pretrained(saved / "model").eval()
        inputs = expected["input_ids"]
        with torch.no_grad():
            logits = model(inputs).logits
            options: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            tokens = model.generate(inputs[:, :24], **options)
        torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-5)
        assert torch.equal(tokens, expected["generated"])

    def test_a_saved_token_file_opens(self, saved):
        from tokenmix_core.data.token_file import TokenFile

        meta = json.loads((saved / "tokens" / "meta.json").read_text())
        file = TokenFile(saved / "tokens", "all")
        written = np.fromfile(saved / "tokens" / "tokens.bin", dtype=meta["dtype"])
        assert len(written) == meta["tokens"]
        assert np.array_equal(np.asarray(file.tokens), written)

    def test_a_killed_run_continues_along_the_curve_of_the_whole_one(self, saved):
        recipe = ["tiny", "--config", "recipe.yaml", "--no-eval"]
        assert self.main(["train", *recipe, "--out", "interrupted", "--resume"]) == 0
        whole, continued = (_losses(saved / name) for name in ("metrics.jsonl", "interrupted/metrics.jsonl"))
        assert sorted(continued) == sorted(whole) == list(range(1, 9))
        for step, loss in whole.items():
            assert continued[step] == pytest.approx(loss, rel=1e-4), step


def _losses(path: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
