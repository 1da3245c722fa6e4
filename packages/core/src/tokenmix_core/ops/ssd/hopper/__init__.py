"""SSD's steps on Hopper for 16-bit inputs, in Gluon.

The portable Triton kernels pass tiles through registers on their way to shared memory and change layouts there. Here
cp.async writes tiles to shared memory during MMAs, which read their operands there.
"""
