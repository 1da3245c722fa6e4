"""Parts of a suite (lengths, tasks, files), of which one may fail while the others run."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from tokenmix_core.evaluation.options import SuiteResult

# errors of wrong input; any other error is a bug, and its traceback is printed
BAD_INPUT = (ValueError, OSError, ImportError)


def report_failure(name: str, error: Exception) -> None:
    """Print to stderr, above the progress bars, that an evaluation or a part of one failed and why."""
    said = [f"{name} failed: {error or type(error).__name__}"]
    if not isinstance(error, BAD_INPUT):
        said += traceback.format_exception(error)
    tqdm.write("\n".join(said), file=sys.stderr)


class Parts:
    """The parts of a suite: each runs inside `with parts.part(name):`, and the suite returns `parts.result(...)`.

    Attributes:
        failed: the errors of failed parts by name.
    """

    def __init__(self) -> None:
        self.failed: dict[str, Exception] = {}
        self._succeeded = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part inside the block; store an error instead of raising it, so that the next part can run."""
        try:
            yield
        except Exception as error:
            self.failed[name] = error
        else:
            self._succeeded += 1

    def take(self, name: str, result: SuiteResult) -> SuiteResult:
        """Store the failed parts that a part's own `result` reports, and return the result without them."""
        failed = result.pop("failed", {})
        self.failed |= {f"{name}, {part}": error for part, error in failed.items()}
        return result

    def result(self, result: SuiteResult) -> SuiteResult:
        """Return `result` with the errors of failed parts, which `evaluate` reports.

        Raises:
            Exception: the first part's error, if no part succeeded.
        """
        if self.failed and not self._succeeded:
            raise next(iter(self.failed.values()))
        return {**result, "failed": self.failed} if self.failed else result
