"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon.

The portable Triton kernels pass tiles through registers on their way to shared memory and change layouts there; they
spill, and synchronise at each such change. Here cp.async writes tiles to shared memory during MMAs, and computed
matrices stay in registers as left operands of the next MMA.
"""
