"""Small fused operations between matrix multiplications."""

# of one launch of `fused_linears`
MAX_WEIGHTS = 6
