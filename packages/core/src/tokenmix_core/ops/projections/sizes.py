"""Which calls the kernel takes."""

import torch

# rows of x: a program has all of them
MOST_ROWS = 64
MOST_WEIGHTS = 6
# where models choose: with more rows than one the library's product is as fast for a single weight, and faster, by more
# than its launches, for weights of more bytes than these on average
MOST_BYTES = 16 << 20
# of x and the weights
DTYPES = (torch.bfloat16, torch.float16)
