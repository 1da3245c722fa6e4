"""Gluon attention kernels for Hopper: WGMMA, with cp.async prefetches behind the MMAs."""

# BM = BN on one warpgroup; two CTAs per SM
TILE = 64
WARPS = 4
# BM of the warp-specialised forward: 64 for each of two consumer warpgroups
ROWS = 128


def constants(q, cu_seqlens, mask) -> dict:
    """Return the constexprs of the kernels except their tile."""
    return {
        **{"D": q.shape[3], "CAUSAL": mask.causal, "WINDOW": mask.window is not None},
        **{"PACKED": cu_seqlens is not None, "num_warps": WARPS},
    }
