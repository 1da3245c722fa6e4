"""Test that kernels on split rows have the errors of kernels on whole rows, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from support.split_kernels import Scan, scan_errors

CASES: dict[str, tuple[int, Scan]] = {
    "several rows per rank": (2, Scan(tokens=128)),
    "two spans per rank, three ranks": (3, Scan(layout="zigzag", batch=2, tokens=128)),
    # the first head's M is negligible, and all heads' M with the greater decay
    "rows whose decay is negligible in one head": (2, Scan(tokens=256, segment=128, dtype=torch.float16)),
    "rows whose decay is negligible": (3, Scan(tokens=256, segment=128, decay=2.0, states=False)),
    "keys of any norm": (2, Scan(tokens=128, qk_l2norm=False, states=False)),
    "SSD, segments of odd spans": (2, Scan("ssd", tokens=150)),
    "SSD, two spans per rank, three ranks": (3, Scan("ssd", layout="zigzag", batch=2, tokens=202)),
    "SSD, one segment per span": (2, Scan("ssd", tokens=100, segment=128, dtype=torch.float16, states=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_split_rows_have_the_errors_of_whole_rows(pool, name):
    size, given = CASES[name]
    errors = pool(size, scan_errors, given)
    assert {"o", "dq", "dk", "dv", "dg"} <= set(errors)
    for tensor, (split, single) in errors.items():
        assert split <= 1.5 * single + 1e-6, f"{tensor}: {split:.1e}, unsplit {single:.1e}"
