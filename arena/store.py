"""Results in one file of JSON lines per comparison (`sizes.Size`), with one line per run, sorted by run.

Writers hold a lock and replace the file atomically: after a kill, the file has either the old or the new content, and
any number of processes may add results at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from tokenmix_core._utils.atomic_io import write_atomically

RUNS = "runs.jsonl"
# the name of the task in keys of speed and memory measurements
COSTS = "costs"
Result = dict[str, Any]


class Key(NamedTuple):
    """Identifies a run within its comparison; results are sorted by their keys.

    Attributes:
        division, contestant, task: names.
        value: the learning rate or, for a cost measurement, the context length.
        seed: the seed; None for a cost measurement.
    """

    division: str
    contestant: str
    task: str
    value: float
    seed: int | None

    @classmethod
    def of(cls, result: Result) -> Key:
        """Return the key of a stored result."""
        names = result["division"], result["contestant"]
        if "length" in result:
            return cls(*names, COSTS, result["length"], None)
        return cls(*names, result["task"], result["rate"], result["seed"])

    @property
    def path(self) -> Path:
        """The path of the run's working folder, relative to the folder of its comparison."""
        value = f"{self.value:d}" if self.seed is None else f"{self.value:g}-{self.seed}"
        return Path(self.division, self.contestant, self.task, value)


class Stored(NamedTuple):
    """A result, with the file and line from which it was read, for error messages."""

    result: Result
    source: str


def load(folder: Path) -> Mapping[Key, Stored]:
    """Return all results of a comparison by key; the file is parsed again only if it has changed.

    Raises:
        ValueError: a line is damaged, or two lines hold the same run; the message has the path and the line's number.
    """
    path = folder / RUNS
    try:
        stat = path.stat()
    except FileNotFoundError:
        return {}
    return _load(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=4)
def _load(path: Path, version: tuple[int, ...]) -> Mapping[Key, Stored]:
    results: dict[Key, Stored] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line:
            source = f"{path}:{number}"
            result = _parse(line, source)
            if (key := Key.of(result)) in results:
                raise ValueError(f"{source} and {results[key].source} hold the same run; remove one of the lines")
            results[key] = Stored(result, source)
    return results


def _parse(text: str, source: str) -> Result:
    try:
        result = json.loads(text)
        hash((Key.of(result), result["rule"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{source} is no result of the arena or is damaged ({error!r}); remove it to go on") from error
    return result


def add(folder: Path, *results: Result) -> None:
    """Add results to the file of a comparison; they replace results with the same keys."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{RUNS}.lock"):
        merged = {key: stored.result for key, stored in load(folder).items()}
        merged |= {Key.of(result): result for result in results}
        lines = [json.dumps(merged[key], ensure_ascii=False) + "\n" for key in sorted(merged, key=_order)]
        write_atomically(folder / RUNS, "".join(lines))


def _order(key: Key) -> tuple[Any, ...]:
    return (*key[:4], -1 if key.seed is None else key.seed)
