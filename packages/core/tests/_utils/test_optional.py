"""Test that a missing optional library is named with the command that installs it; other errors pass unchanged."""

import json
import sys
import types

import pytest

from tokenmix_core._utils.optional import install_command, is_installed, require
from tokenmix_core.cli import main


def test_what_is_there_is_imported():
    assert require("json.decoder", "plots").__name__ == "json.decoder"


def test_what_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("tokenmix_core._utils.optional.install_command", "COMMAND of {}".format)
    with pytest.raises(ImportError, match=r"no_such is not installed; .*: COMMAND of tokenmix-core\[plots\]"):
        require("no_such.module", "plots")


def test_the_package_whose_command_runs_is_named(monkeypatch):
    monkeypatch.setattr("tokenmix_core._utils.optional._about_core", lambda file: "")
    monkeypatch.setitem(sys.modules, "tokenmix_new_paper", types.SimpleNamespace(RECIPES={}))
    commands = []

    def command(args, context):
        commands.append(install_command("tokenmix-core[plots]"))

    monkeypatch.setattr("tokenmix_core.cli.info.info", command)
    for recipes in ({}, "tokenmix_new_paper:RECIPES"):
        assert main(["info"], recipes=recipes) == 0
    with pytest.raises(ImportError, match=r"pip install 'tokenmix-nha\[peft\]'"):
        require("no_such.module", "peft", "tokenmix-nha")
    assert commands == ["pip install 'tokenmix-core[plots]'", "pip install 'tokenmix-new-paper[plots]'"]
    assert install_command("tokenmix-core[plots]") == "pip install 'tokenmix-core[plots]'"


@pytest.mark.parametrize(
    ("workspace", "installer", "command"),
    [
        (True, "uv", "uv sync --all-packages --extra tensorboard --extra wandb"),
        (False, "uv", "uv pip install 'tokenmix-core[tensorboard,wandb]'"),
        (False, "pip", "pip install 'tokenmix-core[tensorboard,wandb]'"),
    ],
)
def test_the_command_suits_how_core_is_installed(workspace, installer, command, tmp_path, monkeypatch):
    package = tmp_path / "packages" / "core"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.uv.workspace]\n" if workspace else "[tool.uv]\n")
    metadata = {"INSTALLER": f"{installer}\n"}
    metadata["direct_url.json"] = json.dumps({"url": package.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr("tokenmix_core._utils.optional._about_core", metadata.get)
    assert install_command("tokenmix-core[tensorboard,wandb]") == command
    # another library is not a package of the workspace
    assert install_command("lm-eval[ruler]").endswith("pip install 'lm-eval[ruler]'")
    monkeypatch.setattr("tokenmix_core._utils.optional._about_core", lambda file: "")
    assert install_command("tokenmix-core[eval]") == "pip install 'tokenmix-core[eval]'"


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
