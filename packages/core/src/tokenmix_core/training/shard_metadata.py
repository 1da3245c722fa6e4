"""Read the metadata of sharded checkpoints, which are pickled, without running code that the file names."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

_METADATA = ".metadata"
# leave out BytesStorageMetadata: torch would unpickle the objects that it announces, and our checkpoints have none
_CLASSES = {
    metadata.__name__: (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
}
# the class of the path to which a checkpoint was written: it depends on the platform, and nothing reads the path
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}


class VerifiedReader(FileSystemReader):
    """torch's reader of sharded checkpoints with metadata that an allow-list unpickler has read.

    Args:
        folder: a folder that `torch.distributed.checkpoint.save` has written tensors into.

    Raises:
        ValueError: the metadata names anything but the classes that describe tensors, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.verified = read_shard_metadata(folder / _METADATA)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was verified; torch's own method would unpickle the file without a check."""
        return self.verified


def read_shard_metadata(path: Path) -> Metadata:
    """Return the unpickled metadata of a sharded checkpoint.

    Raises:
        ValueError: the file names a class or function that does not describe tensors, or cannot be read.
    """
    with path.open("rb") as file:
        try:
            found = _AllowList(file).load()
        except _RefusedError as refused:
            raise ValueError(f"{path} names {refused}, which does not describe tensors and could run code") from None
        except Exception as error:
            # unpickling a damaged file can raise errors of any type
            raise ValueError(f"{path} is damaged ({type(error).__name__})") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"{path} holds a {type(found).__name__}, not the metadata of a sharded checkpoint")
    return found


class _RefusedError(Exception):
    """A pickled file names a class or function outside of the allow list."""


class _AllowList(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return PurePosixPath
        if name not in _CLASSES.get(module, ()):
            raise _RefusedError(f"{module}.{name}")
        return super().find_class(module, name)
