"""Steps of SSD on Hopper for 16-bit inputs, in Gluon, which is part of Triton.

Triton's own forms pass tiles through registers on their way to shared memory and change layouts there; here they go
straight to shared memory, products read them from there, and copies run beside the products.
"""
