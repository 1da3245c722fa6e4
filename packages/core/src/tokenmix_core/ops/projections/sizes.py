"""Which calls the kernel takes."""

import torch

# rows of x: a program has all of them
MOST_ROWS = 64
MOST_WEIGHTS = 6
# of x and the weights
DTYPES = (torch.bfloat16, torch.float16)
