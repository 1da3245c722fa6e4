"""Files and folders that survive a kill or a power loss whole, or are absent."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def check_new_folder(path: Path) -> None:
    """Raise a ValueError for a path that is in use; an empty folder is accepted."""
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a symbolic link to {path.readlink()}, which does not exist; choose another folder")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not empty; choose another folder")


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk.

    A rename or an unlink may reach the disk before the content of other files, so content is synchronised first.
    """
    if os.name == "nt" and path.is_dir():
        # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Synchronise everything below a folder, a folder after its content, and `folder` itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        # another process of a run may rename its temporary file
        with suppress(FileNotFoundError):
            sync(path)
    sync(folder)


def remove(path: Path) -> None:
    """Remove a file or a folder with its content; of a symbolic link only the link, never its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write a file so that readers see the old or the new content, also after a kill or a power loss.

    Args:
        path: the file; its folder is created if necessary.
        content: the text, or a function that fills the temporary file beside `path` whose name it receives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}{path.suffix}")
    # exclusive, with the permissions of any new file
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        if isinstance(content, str):
            temporary.write_text(content, encoding="utf-8")
        else:
            content(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
