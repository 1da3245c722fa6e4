"""Gluon kernels for Hopper: chunks whose gates are weak, in bfloat16; keys' gradients for one query head a slot head."""
