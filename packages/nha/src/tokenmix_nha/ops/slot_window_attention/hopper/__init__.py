"""Gluon kernels for Hopper: chunks whose gates are weak, in bfloat16; gradients of one query head a slot head."""
