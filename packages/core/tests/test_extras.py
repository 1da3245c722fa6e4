"""Missing optional libraries are named with the command that installs them; other errors are left alone."""

import pytest

from tokenmix_core.extras import is_installed, require


def test_what_is_there_is_imported():
    assert require("json.decoder", "plots").__name__ == "json.decoder"


def test_what_is_missing_is_named_with_its_command():
    with pytest.raises(ImportError, match=r"no_such is not installed; .* pip install 'tokenmix-core\[plots\]'"):
        require("no_such.module", "plots")


def test_a_library_that_misses_another_one_says_so_itself(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="'no_such_dependency'"):
        require("half_there", "plots")


def test_a_folder_with_another_distributions_modules_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "shared_name" / "cute").mkdir(parents=True)
    (tmp_path / "shared_name" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("shared_name")
    assert not is_installed("no_such_module")
    (tmp_path / "shared_name" / "__init__.py").write_text("raise AssertionError('it was imported')")
    assert is_installed("shared_name")
