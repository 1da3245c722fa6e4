"""Gluon kernels for Hopper: weak chunks in bfloat16; gradients of keys and gates for one query head a slot head."""
