"""No command of this package runs code from a model's folder without the flag that allows it."""

import pytest

from tokenmix_core.testing.trust import folder_with_code, run_with_yes
from tokenmix_nha.cli import main

CALLS = {
    "generate": ["generate", "DIR", "--prompt", "x"],
    "convert": ["convert", "DIR", "--out", "OUT"],
    "finetune": ["finetune", "DIR", "--stage", "1", "--out", "OUT"],
    "search": ["search", "DIR", "--task", "mqar"],
}


@pytest.mark.parametrize("name", CALLS)
def test_code_in_a_folder_is_refused_and_the_message_names_the_flag(name, tmp_path, capsys):
    folder = folder_with_code(tmp_path / "model")
    folders = {"DIR": str(folder), "OUT": str(tmp_path / "out")}
    assert run_with_yes(main, [folders.get(word, word) for word in CALLS[name]], folder) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
