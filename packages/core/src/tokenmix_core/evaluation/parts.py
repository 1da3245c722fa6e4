"""Parts of a suite (lengths, tasks or files): if one fails, the others still run."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from tokenmix_core.evaluation.options import SuiteResult

# errors that wrong input causes; any other error is a bug and is printed with its traceback
BAD_INPUT = (ValueError, OSError, ImportError)


def report_failure(name: str, error: Exception) -> None:
    """Print to stderr, above the progress bars, that the evaluation or part `name` failed, and why."""
    said = [f"{name} failed: {error or type(error).__name__}"]
    if not isinstance(error, BAD_INPUT):
        said += traceback.format_exception(error)
    tqdm.write("\n".join(said), file=sys.stderr)


class Parts:
    """The parts of a suite: each one runs inside `with parts.part(name):`, and the suite returns `parts.result(...)`.

    Attributes:
        failed: the errors of the parts that failed, by name.
    """

    def __init__(self) -> None:
        self.failed: dict[str, Exception] = {}
        self._succeeded = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context manager for a part: an error inside is stored instead of raised, so that the next part can run."""
        try:
            yield
        except Exception as error:
            self.failed[name] = error
        else:
            self._succeeded += 1

    def take(self, name: str, result: SuiteResult) -> SuiteResult:
        """Store the failures that a part's own `result` reports, under the part's `name`.

        Return the result without them.
        """
        failed = result.pop("failed", {})
        self.failed |= {f"{name}, {part}": error for part, error in failed.items()}
        return result

    def result(self, result: SuiteResult) -> SuiteResult:
        """Return `result` with the errors of failed parts, which `evaluate` then reports.

        Raises:
            Exception: no part succeeded; the error is that of the first part.
        """
        if self.failed and not self._succeeded:
            raise next(iter(self.failed.values()))
        return {**result, "failed": self.failed} if self.failed else result
