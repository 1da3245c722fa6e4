"""Small fused operations between matrix multiplications."""

# the most weights of one launch of `fused_linears`
MAX_WEIGHTS = 6
