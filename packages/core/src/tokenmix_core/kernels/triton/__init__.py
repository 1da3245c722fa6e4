"""Device functions shared by kernels."""
