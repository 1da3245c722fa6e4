"""Gluon kernels for Hopper: weak chunks in bfloat16."""
