"""Split the rows of one evaluation over the processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

from tokenmix_core.evaluation.options import EvalOptions

# the suites whose rows are split
SPLIT = ("perplexity-by-position",)
# seconds without a sign of life from a rank after which the other ranks end
_TIMEOUT = 600.0


@contextmanager
def evaluating_ranks(
    suites: Sequence[str], options: EvalOptions, out: Path
) -> Iterator[tuple[EvalOptions, Path | None]]:
    """Connect this process with those that torchrun started beside it, if any, for one evaluation.

    Yields:
        The options of this process, and the folder for results; None if another process writes them.

    Raises:
        ValueError: several processes, and a suite whose rows are not split.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield options, out
        return
    if whole := [name for name in suites if name not in SPLIT]:
        raise ValueError(f"{whole[0]} runs in one process; start several only for {', '.join(SPLIT)}")
    from tokenmix_core.training.ranks import together

    with together(_TIMEOUT), ExitStack() as quiet:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        first = torch.distributed.get_rank() == 0
        if not first:
            quiet.enter_context(redirect_stdout(quiet.enter_context(open(os.devnull, "w"))))
        yield replace(options, split_rows=True, progress=options.progress and first), out if first else None
    torch.distributed.destroy_process_group()
