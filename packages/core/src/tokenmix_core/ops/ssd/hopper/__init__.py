"""SSD's steps on Hopper for 16-bit inputs, in Gluon.

The portable Triton kernels load tiles into registers, then store them in shared memory and change layouts there. Here
cp.async writes tiles to shared memory during MMAs, and MMAs read their operands from shared memory.
"""
