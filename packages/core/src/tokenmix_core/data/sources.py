"""Sources of text: the hub, local datasets, JSONL, parquet and text files, and Python's standard library."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmix_core._utils.optional import require
from tokenmix_core.data.text import BadRow, FileText, LongText, not_utf8

STDLIB = "stdlib"
# value of `split` in the description of a standard-library token file; older files have none: their split is by each
# text's hash
BY_FAMILY = "module family"
# short names of the corpora on which the papers' models are trained
HUB_ALIASES: dict[str, tuple[str, str | None]] = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-100BT"),
    "slimpajama": ("cerebras/SlimPajama-627B", None),
}
# kinds of files, recognised by the end of the name; a text file is one document
JSONL, PARQUET, TEXT = "JSONL", "parquet", "text"
_KINDS = {
    JSONL: (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"),
    PARQUET: (".parquet",),
    TEXT: (".txt", ".md", ".rst", ".py", ".text"),
}
_READABLE = ", ".join(itertools.chain(*_KINDS.values()))
# endings of files that decode as text but contain data
_NO_TEXT = (".json", ".csv", ".tsv")
# names of folders that are not modules of the library itself, or that some builds of Python lack
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# errors that Arrow raises for damaged files
_DAMAGED_PARQUET = (OSError, ValueError, NotImplementedError)
# maximum number of rows, and of their bytes, that are read from a parquet file at once
_PARQUET_ROWS, _PARQUET_BYTES = 1024, 2**24
# maximum size in bytes of a text file that is read at once; larger files are read in parts
_LONG_BYTES = 2**24
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class ModuleText(str):
    """A document from the standard library.

    Attributes:
        family: name of the module or package that the document belongs to, which decides its split.
    """

    family: str

    def __new__(cls, text: str, family: str = "") -> ModuleText:
        self = super().__new__(cls, text)
        self.family = family
        return self


@dataclass(frozen=True)
class Source:
    """A source of documents.

    Attributes:
        description: plain data that identifies the source; it is stored in every token file made from the source.
        rows: `rows(n)` iterates over the rows after the first n: texts (`LongText` if long), and a `BadRow` for each
            row without text.
        total: number of rows, if it is known in advance.
    """

    description: dict[str, Any]
    rows: Callable[[int], Iterator[str | LongText | BadRow]]
    total: int | None = None

    def documents(self, skip: int = 0) -> Iterator[str]:
        """Yield the texts after the first `skip` rows.

        Raises:
            BadRow: a row without text is reached.
        """
        for row in self.rows(skip):
            if isinstance(row, BadRow):
                raise row
            yield str(row) if isinstance(row, LongText) else row


def open_source(spec: str, *, text_field: str = "text", subset: str | None = None, split: str = "train") -> Source:
    """Open a source of documents.

    Args:
        spec: "stdlib" (the built-in corpus); a JSONL, parquet or text file (a text file is one document); a folder of
            such files, which may be of several kinds; a folder saved by the library `datasets`; "fineweb-edu",
            "slimpajama" or the name of a dataset on the hub.
        text_field: key of the text in a row.
        subset: the configuration name of a dataset on the hub.
        split: name of the dataset's split.

    Raises:
        ValueError: `spec` names no source, or a source that contains nothing readable.
        ImportError: a library that reads the source, such as `datasets`, is not installed.
    """
    if spec == STDLIB:
        return stdlib_source()
    path = Path(spec)
    if path.is_dir() and any((path / f).is_file() for f in ("dataset_info.json", "dataset_dict.json")):
        return _datasets_source(_load_from_disk(path, split), text_field, {"folder": path.name, "split": split})
    if path.exists():
        return _files_source(path, text_field)
    name, default_subset = HUB_ALIASES.get(spec, (spec, None))
    if spec not in HUB_ALIASES and (path.is_absolute() or spec.startswith(".") or _kind_of(path) is not None):
        raise ValueError(f"source {spec!r} does not exist")
    subset = subset if subset is not None else default_subset
    datasets = require("datasets", "data")
    if spec == "slimpajama":
        # this dataset's files are compressed with Zstandard, which datasets does not install
        require("zstandard", "data")
    try:
        # this is safe: datasets from version 4 on runs no code of a repository
        dataset = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:
        # the hub's client raises errors of many types for an unknown name, subset or split, or without a network
        known = f"none of {', '.join([STDLIB, *HUB_ALIASES])}"
        tried = f"stands for {name}, which" if spec in HUB_ALIASES else f"is no file or folder here, {known}, and"
        raise ValueError(f"source {spec!r} {tried} could not be opened on the hub: {_first_line(error)}") from error
    return _datasets_source(dataset, text_field, {"hub": name, "subset": subset, "split": split})


def _load_from_disk(path: Path, split: str) -> Any:
    datasets = require("datasets", "data")
    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as a saved dataset: {_first_line(error)}") from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise ValueError(f"{path} has no split {split!r}; its splits are {', '.join(dataset)}")
        return dataset[split]
    return dataset


def _datasets_source(dataset: Any, text_field: str, description: dict[str, Any]) -> Source:
    fields = dataset.column_names
    if fields is not None and text_field not in fields:
        raise ValueError(f"the dataset has no field {text_field!r}; its fields are {', '.join(fields)}")
    name = description.get("hub") or description["folder"]

    def rows(skip: int) -> Iterator[str | BadRow]:
        index = skip
        try:
            for row in dataset.skip(skip):
                yield _text_of(row, text_field, f"row {index}")
                index += 1
        except (ValueError, TypeError, KeyError) as error:
            # Arrow and the hub's file formats raise these errors for damaged data
            raise ValueError(f"{name} cannot be read from row {index} on: {_first_line(error)}") from error

    total = len(dataset) if hasattr(dataset, "__len__") else None
    return Source({**description, "text_field": text_field}, rows, total)


def _text_of(row: Any, text_field: str, where: str) -> str | BadRow:
    if not isinstance(row, dict) or text_field not in row:
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        return BadRow(f"{where} has no field {text_field!r}; it has {fields}")
    text = row[text_field]
    if not isinstance(text, str):
        got = "null" if text is None else type(text).__name__
        return BadRow(f"{where}: field {text_field!r} must be text, got {got}")
    # a JSON escape may encode only one half of a surrogate pair, which is no text
    if not text.isascii() and (half := _SURROGATE.search(text)) is not None:
        return BadRow(f"{where}: field {text_field!r} holds half a character at position {half.start()}")
    return text


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _kind_of(file: Path) -> str | None:
    return next((kind for kind, ends in _KINDS.items() if file.name.lower().endswith(ends)), None)


def _files_source(path: Path, text_field: str) -> Source:
    """Return a source of a file (of unknown kinds as text), or of a folder's files of known kinds, sorted by path."""
    if path.is_file():
        if path.suffix.lower() in _NO_TEXT:
            raise ValueError(f"{path} is no running text, JSONL or parquet; expected one that ends in {_READABLE}")
        found, kinds = [path], {path: _kind_of(path) or TEXT}
    else:
        found = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path)))
        kinds = {file: kind for file in found if (kind := _kind_of(file)) is not None}
    files = list(kinds)
    if not files:
        raise ValueError(f"{path} holds nothing to read: expected files that end in {_READABLE}")
    description: dict[str, Any] = {
        "files": [f.relative_to(path).as_posix() if path.is_dir() else f.name for f in files][:1000],
        "file_kinds": dict(sorted(Counter(kinds.values()).items())),
        "unread_files": dict(sorted(Counter(f.suffix or f.name for f in found if f not in kinds).items())),
        "bytes": sum(f.stat().st_size for f in files),
    }
    if all(kind == TEXT for kind in kinds.values()):
        total = len(files)
    else:
        description["text_field"], total = text_field, None
    parquet = require("pyarrow.parquet", "data") if PARQUET in kinds.values() else None

    def rows(skip: int) -> Iterator[str | LongText | BadRow]:
        for file, kind in kinds.items():
            if kind == PARQUET:
                skip = yield from _parquet_rows(parquet, file, text_field, skip)
                continue
            count = 0
            for row in [_text_file(file)] if kind == TEXT else _jsonl_rows(file, text_field):
                count += 1
                if count > skip:
                    yield row
            skip = max(0, skip - count)

    return Source(description, rows, total)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _jsonl_rows(file: Path, text_field: str) -> Iterator[str | BadRow]:
    number = 0
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    row = _json_row(line, text_field, f"{file}, line {number}")
                    # free the memory of a long line before its text is used
                    line = b""
                    yield row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield BadRow(f"{file} is damaged or cut short after line {number}: {_first_line(error)}")


def _json_row(line: bytes, text_field: str, where: str) -> str | BadRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(f"{where}: not valid JSON ({error})")
    text = _text_of(row, text_field, where)
    return text if isinstance(text, BadRow) else FileText(text, JSONL)


def _parquet_rows(
    parquet: Any, file: Path, text_field: str, skip: int
) -> Generator[str | LongText | BadRow, None, int]:
    """Yield the rows of a parquet file after the first `skip`; return how many are left to skip in the next file.

    A file that cannot be opened counts as one bad row.
    """
    opened = _open_parquet(parquet, file, text_field)
    if isinstance(opened, BadRow):
        yield from [opened][skip:]
        return max(0, skip - 1)
    first = 0
    for group in range(opened.num_row_groups):
        rows = range(first, first + opened.metadata.row_group(group).num_rows)
        if skip < len(rows):
            yield from itertools.islice(_row_group(opened, group, rows, text_field, file), skip, None)
        skip = max(0, skip - len(rows))
        first = rows.stop
    return skip


def _open_parquet(parquet: Any, file: Path, text_field: str) -> Any:
    try:
        opened = parquet.ParquetFile(file)
        fields = opened.schema_arrow.names
    except _DAMAGED_PARQUET as error:
        return BadRow(f"{file} is not readable as parquet: {_first_line(error)}")
    return opened if text_field in fields else BadRow(f"{file} has no field {text_field!r}; it has {', '.join(fields)}")


def _row_group(opened: Any, group: int, rows: range, text_field: str, file: Path) -> Iterator[str | BadRow]:
    """Yield the rows of a row group, with a `BadRow` for each row that cannot be read because the file is damaged."""
    indices = iter(rows)
    about = opened.metadata.row_group(group)
    each = about.total_byte_size // max(1, about.num_rows)
    count = max(1, min(_PARQUET_ROWS, _PARQUET_BYTES // max(1, each)))
    try:
        for batch in opened.iter_batches(count, row_groups=[group], columns=[text_field]):
            for row in batch.to_pylist():
                text = _text_of(row, text_field, f"{file}, row {next(indices)}")
                yield text if isinstance(text, BadRow) else FileText(text, PARQUET)
    except _DAMAGED_PARQUET as error:
        for index in indices:
            yield BadRow(f"{file}, row {index} cannot be read as parquet: {_first_line(error)}")


def _text_file(file: Path) -> str | LongText | BadRow:
    try:
        if file.stat().st_size > _LONG_BYTES:
            return LongText(file, TEXT)
        # read bytes: reading as text would turn \r\n into \n
        return FileText(file.read_bytes().decode(), TEXT)
    except UnicodeDecodeError as error:
        return not_utf8(file, error.start)
    except BadRow as error:
        return error


def module_family(name: str) -> str:
    """Return the family of a standard-library file, the name that decides its split.

    A package is one family, so that near-duplicates such as the tables in `encodings` stay together. A module and its
    implementation in Python, such as `datetime` and `_pydatetime`, are one family, too: code moves between the two from
    one Python version to the next.
    """
    return re.sub(r"^_+(py_?(?=.))?", "", name.partition("/")[0].removesuffix(".py"))


def stdlib_source(*, by_family: bool = True) -> Source:
    """Return Python's own standard-library sources as a source, one document per file, in the order of their paths.

    Left out: tests, installed packages, files that are not UTF-8, and the files that hold the paths of the machine
    Python was built on. The remaining text depends on the Python version, so its sha256 is part of the description.

    Args:
        by_family: whether whole families of modules are held out, by name: a text that one Python version holds out is
            then in no other version's training part. False selects files by their text, for runs that began with this
            older split.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        # Debian links to files of /etc, which can be absent
        if path.is_file()
        and _STDLIB_LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1])
        and not any(part.startswith(("_sysconfigdata", "config-")) for part in path.relative_to(root).parts)
    )
    texts: list[str] = []
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        texts.append(ModuleText(text, module_family(name)) if by_family else text)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    description = {"corpus": STDLIB, "python": sysconfig.get_python_version(), "sha256": digest.hexdigest()}
    if by_family:
        description["split"] = BY_FAMILY
    return Source(description, lambda skip: iter(texts[skip:]), len(texts))
