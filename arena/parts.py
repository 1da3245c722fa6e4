"""Split files into compressed parts that are small enough to transfer one by one and are checked by their hashes."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core.data.token_file import file_sha256

INDEX = "index.json"
MOST_BYTES = 60 * 2**20
_PRESET = 2


def pack(folder: Path, names: list[str], parts: Path, most: int = MOST_BYTES) -> list[str]:
    """Write files of `folder` as parts of at most `most` bytes, with an index of the parts; return the parts' names.

    If the index already lists parts of the same files, these are kept, so that a call after an interruption continues.
    """
    parts.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"files": {name: file_sha256(folder / name) for name in names}, "parts": {}}
    known = _index(parts)
    if known and known["files"] == index["files"]:
        index = known
    for name in tqdm(names, desc="parts", unit="file"):
        size, offset = (folder / name).stat().st_size, 0
        while offset < size:
            key = f"{names.index(name):02d}-{offset:012d}.xz"
            if key not in index["parts"]:
                index["parts"][key] = _write(folder / name, name, offset, parts / key, most)
                write_atomically(parts / INDEX, json.dumps(index, indent=1))
            offset += index["parts"][key]["bytes"]
    return list(index["parts"])


def _index(parts: Path) -> dict[str, Any]:
    return json.loads((parts / INDEX).read_text()) if (parts / INDEX).is_file() else {}


def _write(path: Path, name: str, offset: int, target: Path, most: int) -> dict[str, Any]:
    """Compress up to 2 · `most` bytes from `offset` on into a part of at most `most` bytes; return its index entry."""
    with path.open("rb") as file:
        count = 2 * most
        while True:
            file.seek(offset)
            content = file.read(count)
            compressed = lzma.compress(content, preset=_PRESET)
            if len(compressed) <= most:
                break
            count = min(count * 7 // 8, int(count * most / len(compressed)))
    write_atomically(target, lambda path: path.write_bytes(compressed))
    digest = hashlib.sha256(compressed).hexdigest()
    return {"file": name, "offset": offset, "bytes": len(content), "sha256": digest}


def unpack(parts: Path, folder: Path) -> list[str]:
    """Write those parts that are available to files in `folder`; return the names of the missing parts.

    A file gets its final name only when it is complete. Parts may arrive one by one, and may be removed after the call.

    Raises:
        ValueError: there is no index, or a part or file is damaged.
    """
    index = _index(parts)
    if not index:
        raise ValueError(f"{parts} has no {INDEX}; transfer it with the first part")
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / ".parts.json"
    done = set(json.loads(state.read_text())) if state.is_file() else set()
    for key, about in index["parts"].items():
        if key in done or not (parts / key).is_file():
            continue
        if file_sha256(parts / key) != about["sha256"]:
            raise ValueError(f"{parts / key} is damaged; transfer it again")
        partial = folder / f"{about['file']}.partial"
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        with partial.open("r+b") as file:
            file.seek(about["offset"])
            file.write(lzma.decompress((parts / key).read_bytes()))
        done.add(key)
        write_atomically(state, json.dumps(sorted(done)))
    for name, digest in index["files"].items():
        partial = folder / f"{name}.partial"
        if partial.is_file() and all(key in done for key, about in index["parts"].items() if about["file"] == name):
            if file_sha256(partial) != digest:
                raise ValueError(f"{folder / name} is damaged after all parts; remove {folder} and unpack again")
            partial.replace(folder / name)
    return [key for key in index["parts"] if key not in done]
