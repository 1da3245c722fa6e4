"""The scorer's kernels for Hopper, in Gluon."""
