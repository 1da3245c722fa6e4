"""Files and folders that survive a kill or a power loss whole, or are absent."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def check_new_folder(path: Path) -> None:
    """Raise a ValueError for a path that is in use; an empty folder is accepted."""
    check_folder_path(path)
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty; choose another folder")


def check_folder_path(path: Path) -> None:
    """Raise a ValueError for a path that cannot become a folder: a file, or a symbolic link without a target."""
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a symbolic link to {path.readlink()}, which does not exist; choose another folder")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, expected a folder or a new path")


def check_writable(folder: Path) -> None:
    """Raise a ValueError unless files can be written to a folder, or to the one in which it would be created."""
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
    """Turn an error of writing into an OSError that names the file and the free space.

    Args:
        what: the content, such as "the model".
        folder: the folder that it is written to.
        errors: further types to catch; torch and safetensors report a full disk as a wrong position in a stream.

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


def is_temporary(path: Path) -> bool:
    """Return whether a name is one of `write_atomically`'s temporary files, which a kill leaves behind."""
    return re.fullmatch(r"\..+-[0-9a-f]{16}(\..*)?", path.name) is not None


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
