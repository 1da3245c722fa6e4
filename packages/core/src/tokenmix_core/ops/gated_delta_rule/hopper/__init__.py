"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon.

The portable Triton kernels pass tiles through registers on their way to shared memory, and change layouts there; this
spills registers, and each change needs a barrier. Here cp.async writes tiles to shared memory during MMAs, and computed
matrices stay in registers as left operands of the next MMA.
"""
