"""Device functions that kernels are written with, and what launches kernels."""
