"""Test that a model's card says what the model is and how to load it, and that only the model is uploaded."""

from __future__ import annotations

import json
import re

import huggingface_hub
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tokenmix_core.cli.app import main
from tokenmix_core.cli.hub import MARK
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

DATA = {"stdlib": "ab" * 32, "tokens-1": "cd" * 32}


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a small model with the files that a run leaves next to it."""
    torch.manual_seed(0)
    options = {"gated_delta_net": {"num_heads": 1, "head_dim": 16}, "attention": {"num_heads": 2}}
    config = HybridConfig(vocab_size=264, hidden_size=32, num_hidden_layers=2, intermediate_size=48,
                          mixers=list(options), mixer_options=options)  # fmt: skip
    folder = tmp_path / "run"
    HybridForCausalLM(config).save_pretrained(folder)
    record = {
        "recipe": "nano", "identity": {"data": DATA}, "device": "cpu", "processes": 1, "versions": {"torch": "2.15"},
        "values": {"sources": ["stdlib", str(tmp_path / "corpora" / "mine")], "learning_rate": 1e-3, "model": {}},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "evaluation").mkdir()
    result = {"suite": "mqar", "settings": {"seed": 0}, "rows": [{"pairs": 8, "accuracy": 0.625}], "plots": []}
    (folder / "evaluation" / "mqar.json").write_text(json.dumps(result))
    (folder / "evaluation" / "mqar.png").write_bytes(b"picture")
    (folder / "checkpoint-4").mkdir()
    (folder / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def hub(monkeypatch):
    """Replace the hub, and return the calls that it would get."""
    sent = []

    class Fake:
        def create_repo(self, repo, **options):
            sent.append((repo, options))

        def upload_folder(self, *, folder_path, allow_patterns, ignore_patterns, **options):
            files = [str(path.relative_to(folder_path)) for path in sorted(folder_path.rglob("*")) if path.is_file()]
            options["files"] = list(huggingface_hub.utils.filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ))  # fmt: skip
            sent.append(options)
            return "there"

    monkeypatch.setattr(huggingface_hub, "HfApi", Fake)
    return sent


def test_a_dry_run_writes_the_card_and_sends_nothing(folder, hub, capsys):
    assert main(["push", str(folder), "me/tiny", "--dry-run", "--license", "apache-2.0"]) == 0
    assert "nothing was uploaded" in capsys.readouterr().out
    assert hub == []
    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "apache-2.0"
    assert head["tags"] == ["tokenmix", "gated_delta_net", "attention"]
    for said in ("# tiny", "1 of gated_delta_net, 1 of attention", "`nano`", "learning_rate: 0.001", "- mine", "0.625",
                 *DATA.values()):  # fmt: skip
        assert said in card
    assert str(folder.parent) not in card


def test_the_card_says_how_the_model_is_loaded(folder, hub, monkeypatch):
    assert main(["push", str(folder), "me/tiny", "--dry-run"]) == 0
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL).group(1)
    lines = [line for line in code.splitlines() if "okenizer" not in line or line.startswith("from")]
    load = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: load({"me/tiny": folder}[name]))
    scope = {}
    exec("\n".join(lines), scope)
    assert isinstance(scope["model"], HybridForCausalLM)


def test_the_model_its_card_and_its_scores_are_uploaded_and_nothing_else(folder, hub, capsys):
    assert main(["push", str(folder), "me/tiny", "--private"]) == 0
    assert hub[0] == ("me/tiny", {"private": True, "exist_ok": True})
    assert hub[1]["repo_id"] == "me/tiny"
    assert set(hub[1]["files"]) == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "evaluation/mqar.png",
    }  # fmt: skip
    assert capsys.readouterr().out.endswith("there\n")
    # a card that `push` has written may be overwritten
    assert main(["push", str(folder), "me/tiny"]) == 0


def test_a_card_of_somebody_elses_is_kept_or_refused(folder, hub, capsys):
    (folder / "README.md").write_text("mine")
    assert main(["push", str(folder), "me/tiny"]) == 2
    assert "--keep-card" in capsys.readouterr().err
    assert main(["push", str(folder), "me/tiny", "--keep-card"]) == 0
    assert (folder / "README.md").read_text() == "mine"
    assert MARK not in "mine"
    (folder / "README.md").unlink()
    assert main(["push", str(folder), "me/tiny", "--keep-card"]) == 2


def test_what_could_not_be_loaded_or_named_is_not_uploaded(folder, hub, capsys):
    for damage, said in (
        (lambda: (folder / "run.json").write_text("{"), "run.json is damaged"),
        (lambda: (folder / "run.json").unlink() or (folder / "model.safetensors").write_bytes(b"x"), "cannot be"),
        (lambda: (folder / "config.json").unlink(), "holds no model"),
    ):
        damage()
        assert main(["push", str(folder), "me/tiny"]) == 2
        assert said in capsys.readouterr().err
    assert main(["push", str(folder), "not a name"]) == 2
    assert hub == []
