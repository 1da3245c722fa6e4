"""Test that a model's folder runs no code of its own unless the user permits it, and that no command reads stdin."""

import pytest

from support.trust import folder_with_code, mark_of, run_with_yes
from tokenmix_core._utils import trust
from tokenmix_core.cli.app import main

CALLS = {
    "generate": ["generate", "DIR", "--prompt", "x"],
    "eval": ["eval", "DIR", "--suite", "perplexity-by-position"],
    "bench": ["bench", "DIR", "--lengths", "8"],
    "push": ["push", "DIR", "me/it", "--dry-run"],
    "info": ["info", "DIR"],
    "convert": ["convert", "DIR", "--out", "OUT"],
    "prepare": ["data", "prepare", "TEXT", "OUT", "--tokenizer", "DIR"],
    "train": ["train", "tiny", "--tokenizer", "DIR", "--out", "OUT"],
}


def call_of(name, folder, tmp_path, text_file):
    places = {"DIR": str(folder), "OUT": str(tmp_path / "out"), "TEXT": text_file}
    return [places.get(word, word) for word in CALLS[name]]


@pytest.mark.parametrize("name", CALLS)
def test_code_of_a_folder_is_refused_with_the_flag_that_allows_it(name, tmp_path, text_file, capsys):
    folder = folder_with_code(tmp_path / "model")
    assert run_with_yes(main, call_of(name, folder, tmp_path, text_file), folder) == 2
    said = capsys.readouterr().err
    assert ("with_code" if name == "convert" else "--trust-remote-code") in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["generate", "push", "info", "prepare"])
def test_a_model_of_a_known_type_is_loaded_without_its_code(name, tmp_path, text_file, checkpoint):
    folder = folder_with_code(tmp_path / "model", checkpoint)
    call = call_of(name, folder, tmp_path, text_file)
    assert run_with_yes(main, call, folder) == 0


def test_a_pipe_cannot_say_yes(tmp_path, monkeypatch, capsys):
    folder = folder_with_code(tmp_path / "model")
    (tmp_path / "input").write_text("y\nhello\n")
    with (tmp_path / "input").open() as given:
        monkeypatch.setattr("sys.stdin", given)
        assert main(["generate", str(folder), "--prompt", "-"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--trust-remote-code" in said.err
    assert not mark_of(folder).exists()


def test_code_runs_where_it_is_trusted(tmp_path, capsys):
    folder = folder_with_code(tmp_path / "model")
    assert main(["info", str(folder), "--trust-remote-code"]) == 0
    assert "with_code" in capsys.readouterr().out
    assert mark_of(folder).exists()
    # the permission was only for this command
    assert not trust.is_trusted()


def test_a_tokenizer_that_tasks_load_with_trust_has_no_code(tmp_path, checkpoint):
    from transformers import AutoTokenizer

    from tokenmix_core.cli.commands import load_tokenizer
    from tokenmix_core.evaluation.harness import _remove_code

    folder = folder_with_code(tmp_path / "model", checkpoint)
    saved = tmp_path / "saved"
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": [f"{folder}--code.Tokenizer"] * 2}
    tokenizer.save_pretrained(saved)
    assert "auto_map" in (saved / "tokenizer_config.json").read_text()
    _remove_code(saved)
    AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
    assert not mark_of(folder).exists()
