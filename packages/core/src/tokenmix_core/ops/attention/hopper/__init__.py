"""Attention's kernels for Hopper in Gluon, part of Triton: tiles go straight to shared memory, beside the products."""

import torch

# queries that meet as many keys on four warps; two blocks share a multiprocessor
TILE = 64
WARPS = 4


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> bool:
    """Whether these kernels can read the tensors: on Hopper, 16 bits, heads of 64 or 128, in runs of 16 bytes."""
    sizes = q.element_size() == 2 and q.shape[3] == v.shape[3] and q.shape[3] in (64, 128)
    return sizes and all(x.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in x.stride()[:3]) for x in (q, k, v, *more))
