"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon, which is part of Triton.

Triton's own forms of these steps pass tiles through registers on their way to shared memory and change layouts there;
they spill, and wait at every such place. Here tiles go straight to shared memory while products run, and computed
matrices stay in registers as left operands of the next product.
"""
