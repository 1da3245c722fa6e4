"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def check_new_folder(path: Path) -> None:
    """Raise a ValueError for a path where something lies already; an empty folder is fine."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not empty; choose another folder")


def write_atomically(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write a file so that a reader, and whoever comes after a kill, sees the old content or the new, never a part.

    Args:
        path: the file; its folder is made where there is none.
        content: its text, or a function that fills the temporary file beside `path` whose name it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}{path.suffix}")
    # as readable as any new file, and nobody else's
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "r+b") as file:
            if isinstance(content, str):
                temporary.write_text(content, encoding="utf-8")
            else:
                content(temporary)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
