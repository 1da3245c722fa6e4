"""Write files and folders atomically: after a kill or a power loss each one is complete or absent."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_new_folder(path: Path) -> None:
    """Raise a ValueError if anything but an empty folder exists at `path`."""
    check_folder_path(path)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; choose another folder")


def check_folder_path(path: Path) -> None:
    """Raise a ValueError if `path` cannot be a folder: a file, or a symbolic link without a target."""
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a symbolic link to {path.readlink()}, which does not exist; choose another folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, expected a folder or a new path")


def check_writable(folder: Path) -> None:
    """Raise a ValueError unless files can be written into `folder`, or its nearest existing parent if it is missing."""
    check_folder_path(folder)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    probe = there / f".probe-{secrets.token_hex(8)}"
    try:
        try:
            probe.write_text("probe", encoding="utf-8")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}); choose another folder") from error


@contextmanager
def writing(what: str, folder: Path, *errors: type[Exception]) -> Iterator[None]:
    """Context manager: turn an error of writing into an OSError that names the content and the free space.

    Args:
        what: name of the content that is written, such as "the model".
        folder: the folder that is written to.
        errors: further types of errors: torch and safetensors report a full disk as a wrong position in a stream.

    Raises:
        OSError: writing failed.
    """
    try:
        yield
    except (OSError, *errors) as error:
        free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
        space = f"{free / 1e6:,.1f} MB are free"
        if (most := _file_size_limit()) is not None:
            space += f" and the limit of a file's size is {most / 1e6:,.1f} MB (ulimit -f)"
        raise OSError(f"{what} could not be written into {folder}, where {space}: {error}") from error


def _file_size_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on disk.

    Contents must be on disk before a rename or an unlink, which could otherwise reach the disk first.
    """
    if os.name == "nt" and path.is_dir():
        # do nothing on Windows, which cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Call `sync` for all files and folders below `folder`, contents before the folder that lists them."""
    for path in sorted(folder.rglob("*"), reverse=True):
        # ignore a missing file: it was a temporary file, which another process of the run has renamed
        with suppress(FileNotFoundError):
            sync(path)
    sync(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; for a symbolic link remove the link and keep its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """True if a path has the name of a temporary file of `write_atomically`; a killed process can leave such a file."""
    return re.fullmatch(r"\..+-[0-9a-f]{16}(\..*)?", path.name) is not None


def write_atomically(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write a file so that readers find either its old or its new content, even after a kill or a power loss.

    Args:
        path: the file; its folder is created if necessary.
        content: the text, or a function that takes the path of a temporary file beside `path` and fills that file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}{path.suffix}")
    # O_EXCL fails if the file exists; 0o666 gives it the usual permissions
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
