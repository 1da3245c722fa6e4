"""Test integers whose copy starts now and that are read later."""

import pytest
import torch

from tokenmix_core.kernels.launch.async_read import Asked, to_device


def test_a_number_is_read_as_it_was_when_it_was_asked_for(device):
    x = torch.tensor(3, device=device)
    asked = Asked(x)
    x += 1
    assert (asked.read(), asked.read(), Asked(x).read()) == (3, 3, 4)


@pytest.mark.gpu
def test_reading_does_not_wait_for_what_came_after_the_question():
    x, later = torch.tensor(3, device="cuda"), torch.cuda.Event()
    torch.cuda.synchronize()
    asked = Asked(x)
    # the device sleeps for some tenths of a second
    torch.cuda._sleep(10**9)
    later.record()
    assert asked.read() == 3
    assert not later.query()
    torch.cuda.synchronize()


def test_lists_are_copied_in_both_directions(device):
    x = to_device([3, 1, 2], torch.device(device), torch.int32)
    asked = Asked(x)
    x += 1
    assert x.dtype == torch.int32
    assert (asked.read_list(), x.tolist(), to_device([[0.5]], x.device).tolist()) == ([3, 1, 2], [4, 2, 3], [[0.5]])
