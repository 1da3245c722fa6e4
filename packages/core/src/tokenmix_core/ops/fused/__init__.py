"""Small fused operations between matrix multiplications."""

# the maximum number of weights in one launch of `fused_linears`
MAX_WEIGHTS = 6
