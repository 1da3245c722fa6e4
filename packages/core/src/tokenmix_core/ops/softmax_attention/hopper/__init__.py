"""Gluon attention kernels for Hopper: WGMMA, with cp.async prefetches during the MMAs."""

# tile of 64 queries by 64 keys for one warpgroup; two to four CTAs run on an SM
TILE = 64
WARPS = 4
# queries per tile of the warp-specialised forward: 64 for each of two consumer warpgroups
ROWS = 128


def constants(q, cu_seqlens, mask) -> dict:
    """Return the constexprs that all kernels of this package take, except those of their tiles."""
    return {
        **{"D": q.shape[3], "CAUSAL": mask.causal, "WINDOW": mask.window is not None},
        **{"PACKED": cu_seqlens is not None, "num_warps": WARPS},
    }
