"""Small fused operations between matrix multiplications."""
