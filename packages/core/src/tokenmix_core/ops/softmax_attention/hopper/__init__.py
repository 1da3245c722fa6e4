"""Attention's kernels for Hopper in Gluon, part of Triton: tiles go straight to shared memory, beside the products."""

# queries that meet as many keys on four warps; two blocks share a multiprocessor
TILE = 64
WARPS = 4
# rows of a program by groups of warps: 64 for each of two
ROWS = 128


def constants(q, cu_seqlens, mask) -> dict:
    """What the kernels are compiled for beside their tile."""
    return {
        **{"D": q.shape[3], "CAUSAL": mask.causal, "WINDOW": mask.window is not None},
        **{"PACKED": cu_seqlens is not None, "num_warps": WARPS},
    }
