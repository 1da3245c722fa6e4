"""Gluon kernels for Hopper, for weak chunks in bfloat16."""
