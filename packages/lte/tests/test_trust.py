"""No command of this package runs the code of a model's folder without --trust-remote-code."""

import pytest

from tokenmix_core.testing.trust import folder_with_code, run_with_yes
from tokenmix_lte.cli import main

CALLS = {
    "generate": ["generate", "DIR", "--prompt", "x"],
    "convert": ["convert", "DIR", "--out", "OUT"],
    "evict": ["evict", "DIR", "--method", "tova", "--out", "OUT"],
}


@pytest.mark.parametrize("name", CALLS)
def test_code_of_a_folder_is_refused_with_the_flag_that_allows_it(name, tmp_path, capsys):
    folder = folder_with_code(tmp_path / "model")
    folders = {"DIR": str(folder), "OUT": str(tmp_path / "out")}
    assert run_with_yes(main, [folders.get(word, word) for word in CALLS[name]], folder) == 2
    assert "--trust-remote-code" in capsys.readouterr().err
