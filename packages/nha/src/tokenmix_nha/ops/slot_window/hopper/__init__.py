"""Gluon kernels for Hopper in bfloat16, for weak chunks: chunks in which no slot decays by more than 80 bits."""
