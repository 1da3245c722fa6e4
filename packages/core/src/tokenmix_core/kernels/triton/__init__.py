"""Device functions that the portable kernels of several operations share."""
