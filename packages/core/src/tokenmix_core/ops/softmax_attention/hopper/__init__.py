"""Attention's kernels for Hopper in Gluon, part of Triton: tiles go straight to shared memory, beside the products."""

# queries that meet as many keys on four warps; two blocks share a multiprocessor
TILE = 64
WARPS = 4
