"""Locks by which one process at a time writes to a folder.

The system releases them after a kill, and they name the holder.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from tokenmix_core._utils.atomic_io import check_folder_path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK, HOLDER = ".lock", ".lock.json"
LOCK_FILES = (LOCK, HOLDER)
# seconds to wait for a lock: a killed process's workers notice its end within 5 s, and hold its lock until then
_ORPHANS_SECONDS = 15.0


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Context manager: create a folder, and enter when no other process on this machine is inside for this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        # without locks, as on some network file systems, do not wait
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class FolderLock:
    """An exclusive lock on a folder, used in a `with` block; a folder that it has created is removed at the end if
    empty.

    Args:
        folder: the folder that is written.
        doing: activity of this process, such as "training", for error messages of other processes.

    Raises:
        ValueError: on entering, another process holds the lock; the message names process, host and time.
    """

    def __init__(self, folder: Path, doing: str) -> None:
        self.folder, self.doing = folder, doing
        self._lock: FileLock | None = None
        self._made: list[Path] = []

    def acquire(self) -> None:
        """Create the folder if it is missing, and take its lock; wait only if the holder seems to be dead.

        Raises:
            ValueError: another process holds the lock (the message names it), or the path cannot be a folder.
        """
        check_folder_path(self.folder)
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            try:
                lock.acquire(timeout=_ORPHANS_SECONDS if _holder_is_dead(self.folder) else 0)
            except Timeout:
                raise ValueError(_in_use(self.folder)) from None
        self._lock = lock
        about = {"pid": os.getpid(), "host": socket.gethostname(), "doing": self.doing}
        about |= {"since": datetime.now().astimezone().isoformat(" ", "seconds")}
        # write directly: another process could regard a temporary file as content of the folder
        (self.folder / HOLDER).write_text(json.dumps(about) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Release the lock; remove its files, and folders that `acquire` created if they are empty."""
        if self._lock is None:
            return
        # remove the files while the lock is held: later, another process may hold the lock
        with suppress(OSError):
            for name in LOCK_FILES:
                (self.folder / name).unlink(missing_ok=True)
            for path in self._made:
                # remove empty folders upwards, until the first folder that is not empty raises an error
                path.rmdir()
        self._lock.release()
        self._lock = None

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def contents(folder: Path) -> list[Path]:
    """Return the entries of a folder, except the lock's files."""
    return [path for path in folder.iterdir() if path.name not in LOCK_FILES]


def check_unused(folder: Path) -> None:
    """Raise a ValueError that names the process if another process is writing to `folder`."""
    if not (folder / HOLDER).is_file():
        return
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(_in_use(folder)) from None
    lock.release()


def _holder(folder: Path) -> dict[str, object]:
    try:
        return dict(json.loads((folder / HOLDER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        # the holder of the lock has not written its name yet
        return {}


def _holder_is_dead(folder: Path) -> bool:
    about = _holder(folder)
    pid = about.get("pid")
    if about.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _in_use(folder: Path) -> str:
    about, who = _holder(folder), "another process has it"
    if about:
        who = "process {pid} on {host} has been {doing} there since {since}".format(**about)
    return f"{folder} is in use: {who}; wait until it ends, or choose another folder"
