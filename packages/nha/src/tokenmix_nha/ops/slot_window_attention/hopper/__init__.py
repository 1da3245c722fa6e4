"""Gluon kernels for Hopper: weak chunks, 16 bits, one query head a slot head."""
