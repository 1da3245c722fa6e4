"""Two operations' outputs as one: norms, weights, sum and gate."""
