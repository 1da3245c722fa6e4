"""The folder of a run: check that the run may write to it, and lock it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tokenmix_core._utils.atomic_io import check_folder_path, is_temporary
from tokenmix_core._utils.locks import FolderLock, check_unused, contents
from tokenmix_core.training import checkpoint
from tokenmix_core.training.manifest import RUN_MANIFEST, read_manifest

METRICS = "metrics.jsonl"


def check_folder(output_dir: Path, *, resume: bool) -> None:
    """Raise an error if a run must not write to this folder.

    Raises:
        ValueError: the folder holds files other than those of a run without a checkpoint; or it holds a checkpoint
            although `resume` is False. The message says so if another process is writing to the folder.
    """
    check_folder_path(output_dir)
    saved = checkpoint.checkpoint_steps(output_dir)
    if (resume and saved) or not output_dir.exists():
        return
    found = contents(output_dir)
    if saved or not (_only_begun(output_dir, found) or all(is_temporary(path) for path in found)):
        check_unused(output_dir)
        way = "resume the run that it holds" if saved else "remove it"
        raise ValueError(f"{output_dir} is not empty; {way}, or choose another folder")


def _only_begun(output_dir: Path, found: list[Path]) -> bool:
    """True if `found`, a folder's content, comes only from a run that ended before its first checkpoint."""
    # the folder "runs" is TensorBoard's
    known = {RUN_MANIFEST, METRICS, checkpoint.PARTIAL, "runs"}
    if any(path.name not in known and not is_temporary(path) for path in found):
        return False
    try:
        read_manifest(output_dir)
    except ValueError:
        return False
    return True


def run_lock(output_dir: str | Path, *, resume: bool = False) -> AbstractContextManager[Any]:
    """Return the lock of a run's folder, to be held while writing there; rank 0 takes it for all ranks of the run.

    If `resume`, the folder may contain a run, which is continued.

    Raises:
        ValueError: the reasons given at `check_folder`; or, on entering, that another process holds the lock.
    """
    check_folder(Path(output_dir), resume=resume)
    return FolderLock(Path(output_dir), "training") if os.environ.get("RANK", "0") == "0" else nullcontext()
