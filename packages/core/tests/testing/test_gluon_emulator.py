"""Test that the Gluon emulator leaves other modules unchanged."""

import torch

from tokenmix_core.ops.softmax_attention.autograd import attention_op
from tokenmix_core.testing import gluon_emulator


def test_kernels_imported_again_leave_torch_operators_registered():
    q = torch.randn(1, 6, 2, 16)
    inputs = (q, q, q, None, True, None, 0, 0.25, "sdpa")
    before = attention_op(*inputs)
    gluon_emulator.load("tokenmix_core", "ops.ssd.hopper.step")
    assert torch.equal(attention_op(*inputs)[0], before[0])
