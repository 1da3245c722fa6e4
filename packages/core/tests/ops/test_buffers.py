"""Test views of a buffer that holds several tensors, and tensors as rows of one stride."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmix_core.ops.buffers import buffer_bytes, buffer_views, rows_of

LAYOUTS = [((2, 3, 5), torch.float32), ((7,), torch.bfloat16), ((), torch.float32), ((3, 1, 2), torch.int64)]


class Counted(TorchDispatchMode):
    """Counts torch's operations."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("before", [0, 1024])
def test_parts_of_a_buffer_are_contiguous_aligned_and_apart(before):
    whole = torch.zeros(before + buffer_bytes(LAYOUTS), dtype=torch.uint8)[before:]
    parts = buffer_views(whole, LAYOUTS)
    assert [(x.shape, x.dtype) for x in parts] == LAYOUTS
    assert all(x.is_contiguous() for x in parts)
    assert [x.data_ptr() - whole.data_ptr() for x in parts] == [0, 512, 1024, 1536]
    for i, x in enumerate(parts):
        x.fill_(i + 1)
    assert all((x == i + 1).all() for i, x in enumerate(parts))
    assert not whole[120:512].any()


def test_a_part_of_a_buffer_takes_one_view_and_each_dtype_another():
    whole = torch.zeros(buffer_bytes(LAYOUTS), dtype=torch.uint8)
    with Counted() as counted:
        buffer_views(whole, LAYOUTS)
    # torch makes a view of another dtype by one or two operations
    assert counted.operations <= len(LAYOUTS) + 2 * len({dtype for _, dtype in LAYOUTS})


@pytest.mark.parametrize(
    ("x", "stride", "copied"),
    [
        (torch.zeros(2, 5, 4, 8), 32, False),
        (torch.zeros(2, 5, 8, 8)[:, :, 2:6], 64, False),
        (torch.zeros(2, 5, 4, 9)[..., :8], 32, True),
    ],
    ids=["contiguous", "part of the heads", "part of each head"],
)
def test_rows_of_several_dimensions_are_copied_only_if_they_have_no_common_stride(x, stride, copied):
    x.normal_()
    rows = rows_of(x, 2)
    assert rows[1:] == (10, 32, stride)
    assert (rows.x.data_ptr() != x.data_ptr()) == copied
    torch.testing.assert_close(rows.x.as_strided((10, 32), (stride, 1), rows.x.storage_offset()), x.reshape(10, 32))


def test_contiguous_rows_take_no_operation():
    with Counted() as counted:
        x = torch.zeros(2, 5, 4, 8)
        assert rows_of(x) == (x, 40, 8, 8)
    # the operation that makes x
    assert counted.operations == 1
