"""Which calls the kernel takes."""

import torch

# rows of x: a program has all of them
MOST_ROWS = 64
MOST_WEIGHTS = 6
# of a weight, on average: with several rows the library is faster above this, and for one weight as fast at any size
MOST_BYTES = 16 << 20
# of x and the weights
DTYPES = (torch.bfloat16, torch.float16)
