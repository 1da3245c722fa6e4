"""Steps of the gated delta rule on Hopper for 16-bit inputs, in Gluon.

The portable Triton kernels load tiles into registers and change their layouts through shared memory. This spills
registers, and each change needs a barrier. Here cp.async writes tiles to shared memory during MMAs, and computed
matrices stay in registers as left operands of the next MMA. The op's README.md defines the letters (Ã, γ, Γ, R, P', …).
"""
