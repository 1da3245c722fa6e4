"""Where text comes from: the hub, local datasets, JSONL, parquet, text files, and Python's standard library."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmix_core.extras import require

STDLIB = "stdlib"
# short names for the corpora that the papers train on
HUB_ALIASES: dict[str, tuple[str, str | None]] = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-100BT"),
    "slimpajama": ("cerebras/SlimPajama-627B", None),
}
_JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_TEXT = (".txt", ".md", ".rst", ".py", ".text")
# folders of the standard library that are not running text of its own, or do not come with every build
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """A source of documents.

    Attributes:
        description: what it is, recorded with every token file made from it.
        documents: `documents(n)` iterates over the texts after the first n.
        total: number of documents, where it is known beforehand.
    """

    description: dict[str, Any]
    documents: Callable[[int], Iterator[str]]
    total: int | None = None


def open_source(spec: str, *, text_field: str = "text", subset: str | None = None, split: str = "train") -> Source:
    """Open a source of documents.

    Args:
        spec: "stdlib" (the built-in corpus), a JSONL, parquet or text file, a folder of them (a text file is one
            document) or one saved by `datasets`, "fineweb-edu", "slimpajama", or a dataset's name on the hub.
        text_field: the field that holds the text.
        subset: the configuration of a hub dataset.
        split: the split of a dataset.

    Raises:
        ValueError: nothing of that name, or nothing in it that can be read.
        ImportError: `datasets` is needed and not installed.
    """
    if spec == STDLIB:
        return stdlib_source()
    path = Path(spec)
    if path.is_dir() and any((path / f).is_file() for f in ("dataset_info.json", "dataset_dict.json")):
        return _datasets_source(_load_from_disk(path, split), text_field, {"folder": path.name, "split": split})
    if path.exists():
        return _files_source(path, text_field)
    name, default_subset = HUB_ALIASES.get(spec, (spec, None))
    if spec not in HUB_ALIASES and (path.is_absolute() or spec.startswith(".") or path.suffix in (*_TEXT, *_JSONL)):
        raise ValueError(f"source {spec!r} does not exist")
    subset = subset if subset is not None else default_subset
    datasets = require("datasets", "data")
    try:
        dataset = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:
        # the hub's client raises many kinds of errors for an unknown name, a missing network, a wrong subset or split
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        known = f"none of {', '.join([STDLIB, *HUB_ALIASES])}"
        tried = f"stands for {name}, which" if spec in HUB_ALIASES else f"is no file or folder here, {known}, and"
        raise ValueError(f"source {spec!r} {tried} could not be opened on the hub: {reason}") from error
    return _datasets_source(dataset, text_field, {"hub": name, "subset": subset, "split": split})


def _load_from_disk(path: Path, split: str) -> Any:
    dataset = require("datasets", "data").load_from_disk(str(path))
    if isinstance(dataset, dict):
        if split not in dataset:
            raise ValueError(f"{path} has no split {split!r}; its splits are {', '.join(dataset)}")
        return dataset[split]
    return dataset


def _datasets_source(dataset: Any, text_field: str, description: dict[str, Any]) -> Source:
    fields = dataset.column_names
    if fields is not None and text_field not in fields:
        raise ValueError(f"the dataset has no field {text_field!r}; its fields are {', '.join(fields)}")

    def documents(skip: int) -> Iterator[str]:
        for index, row in enumerate(dataset.skip(skip), start=skip):
            yield _text_of(row, text_field, f"row {index}")

    total = len(dataset) if hasattr(dataset, "__len__") else None
    return Source({**description, "text_field": text_field}, documents, total)


def _text_of(row: Any, text_field: str, where: str) -> str:
    if not isinstance(row, dict) or text_field not in row:
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no field {text_field!r}; it has {fields}")
    if not isinstance(row[text_field], str):
        raise ValueError(f"{where}: field {text_field!r} must be text, got {type(row[text_field]).__name__}")
    try:
        row[text_field].encode()
    except UnicodeEncodeError as error:
        # JSON may escape one half of a pair of surrogates alone
        raise ValueError(f"{where}: field {text_field!r} holds half a character at place {error.start}") from error
    return row[text_field]


def _files_source(path: Path, text_field: str) -> Source:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and p.name[0] != ".")
    if path.is_dir():
        kinds = [[f for f in files if f.name.endswith(k)] for k in (_JSONL, (".parquet",), _TEXT)]
        files = next((chosen for chosen in kinds if chosen), [])
    if not files:
        expected = ", ".join((*_JSONL, ".parquet", *_TEXT))
        raise ValueError(f"{path} holds nothing to read: expected files that end in {expected}")
    description = {
        "files": [f.relative_to(path).as_posix() if path.is_dir() else f.name for f in files][:1000],
        "bytes": sum(f.stat().st_size for f in files),
    }
    if files[0].suffix == ".parquet":
        datasets = require("datasets", "data")
        names = [str(f) for f in files]
        try:
            dataset = datasets.load_dataset("parquet", data_files=names, split="train", streaming=True)
            return _datasets_source(dataset, text_field, description)
        except (OSError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f"{path} is not readable as parquet: {error}") from error
    if files[0].name.endswith(_JSONL):

        def documents(skip: int) -> Iterator[str]:
            return itertools.islice(_jsonl_documents(files, text_field), skip, None)

        return Source({**description, "text_field": text_field}, documents)
    return Source(description, lambda skip: map(_read_text, files[skip:]), len(files))


def _jsonl_documents(files: list[Path], text_field: str) -> Iterator[str]:
    for file in files:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{file}, line {number}: not valid JSON ({error})") from error
                yield _text_of(row, text_field, f"{file}, line {number}")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: byte {error.start} cannot be decoded") from error


def stdlib_source() -> Source:
    """Python's own standard-library sources, one document a file, in the order of their paths.

    Left out: tests, installed packages, and the files that record the paths of the machine Python was built on. What
    remains depends on the Python build, so its sha256 is part of the description.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if _STDLIB_LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1])
        and not any(part.startswith(("_sysconfigdata", "config-")) for part in path.relative_to(root).parts)
    )
    texts: list[str] = []
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:
            continue
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    description = {"corpus": STDLIB, "python": sysconfig.get_python_version(), "sha256": digest.hexdigest()}
    return Source(description, lambda skip: iter(texts[skip:]), len(texts))
