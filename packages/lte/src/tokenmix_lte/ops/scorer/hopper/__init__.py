"""The scorer's Gluon kernels for Hopper."""
