"""Atomic checkpoints: written to a temporary folder, which is then renamed.

A checkpoint has a manifest of its files, which resuming checks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenmix_core._utils.atomic_io import remove, sync, sync_tree, write_atomically
from tokenmix_core.data.token_file import file_sha256

MANIFEST = "manifest.json"
PARTIAL = ".partial"
_STATE = "trainer_state.json"


def checkpoint_steps(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoint folders of a run by step, in ascending order."""
    found = {}
    for path in output_dir.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if path.is_dir() and step.isdecimal():
            found[int(step)] = path
    return dict(sorted(found.items()))


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint's manifest: size and sha256 of each of its files, and the entries of `content`."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(file_sha256, files))
    listed = {
        p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": s}
        for p, s in zip(files, sums, strict=True)
    }
    write_atomically(folder / MANIFEST, json.dumps({**content, "files": listed}, indent=1))


def check_checkpoint(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise an error if a checkpoint is damaged or belongs to another run.

    Args:
        folder: the checkpoint.
        identity: the values on which the run's loss curve depends.

    Raises:
        ValueError: a file is missing or damaged, or a value differs from `identity`; the message names the file or
            value.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        saved, step = dict(manifest["identity"]), int(manifest["step"])
        files = {name: (int(about["bytes"]), str(about["sha256"])) for name, about in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{folder} cannot be resumed from: it has no readable {MANIFEST} ({type(error).__name__}), so it was not "
            "written by this trainer or is damaged"
        ) from error
    # ignore `fsdp`, which older versions stored here: it may change when a run resumes
    saved.pop("fsdp", None)
    wanted = json.loads(json.dumps(identity))
    if isinstance(saved.get("data"), dict) and isinstance(wanted.get("data"), dict):
        saved["data"] = {key: _widened(old, wanted["data"].get(key)) for key, old in saved["data"].items()}
    differing = sorted(key for key in {*saved, *wanted} if saved.get(key) != wanted.get(key))
    if differing:
        told = "; ".join(f"{key} was {saved.get(key)!r} and is {wanted.get(key)!r}" for key in differing)
        raise ValueError(f"{folder} belongs to another run: {told}")
    # check these files here, because the Trainer silently resets an optimizer or random state whose file is missing
    for needed in ("model", "optimizer", "scheduler", "rng_state", "trainer_state"):
        if not any(name.startswith(needed) for name in files):
            raise ValueError(f"{folder} is damaged: its {MANIFEST} lists no {needed}")
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{folder} is damaged: {name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{folder} is damaged: {name} has {path.stat().st_size} bytes, expected {size}")
    with ThreadPoolExecutor(8) as pool:
        sums = pool.map(file_sha256, [folder / name for name in files])
        for (name, (_, expected)), got in zip(files.items(), sums, strict=True):
            if got != expected:
                raise ValueError(f"{folder} is damaged: the content of {name} has changed since it was written")
    try:
        reached = json.loads((folder / _STATE).read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} is damaged: {_STATE} cannot be read ({type(error).__name__})") from error
    if reached != step:
        raise ValueError(f"{folder} is damaged: {_STATE} is of step {reached!r}, expected {step}")


def _widened(saved: Any, wanted: Any) -> Any:
    """Return `wanted` if `saved`, a corpus's fingerprint, is the old form of it, without documents; else `saved`."""
    old_form = isinstance(saved, str) and isinstance(wanted, str) and wanted.startswith(f"{saved} documents ")
    return wanted if old_form else saved


def checkpoint_to_resume(output_dir: Path, identity: Mapping[str, Any]) -> Path | None:
    """Check the last checkpoint of a run and return its folder, or None if the run has no checkpoint.

    A folder gets the name of a checkpoint only when it is complete. A damaged last checkpoint was therefore damaged
    later, which is an error: resuming silently from an older checkpoint would hide it.

    Raises:
        ValueError: the last checkpoint is damaged or belongs to another run.
    """
    found = checkpoint_steps(output_dir)
    if not found:
        return None
    *older, last = found.values()
    try:
        check_checkpoint(last, identity)
    except ValueError as error:
        hint = f"; remove it to go on from {older[-1].name}" if older and "damaged" in str(error) else ""
        raise ValueError(f"{error}{hint}") from error
    return last


def publish(partial: Path, output_dir: Path) -> None:
    """Move everything in `partial` to `output_dir`. After a power loss, each folder is either whole or absent.

    config.json is moved last, so that a folder with config.json holds a complete model.
    """
    sync_tree(partial)
    for path in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
        target = output_dir / path.name
        if target.is_dir():
            # keep an existing checkpoint of this step until the new one has its name
            replaced = partial / f"{path.name}.replaced"
            os.replace(target, replaced)
            os.replace(path, target)
            sync(output_dir)
            remove(replaced)
        else:
            os.replace(path, target)
    partial.rmdir()
    sync(output_dir)


def remove_old_checkpoints(output_dir: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints, which `publish` has already flushed to disk."""
    for path in list(checkpoint_steps(output_dir).values())[:-keep]:
        remove(path)
