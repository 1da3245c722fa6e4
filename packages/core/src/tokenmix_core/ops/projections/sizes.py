"""Which calls the kernel takes."""

import torch

# rows of x: a program has all of them
MOST_ROWS = 64
MOST_WEIGHTS = 6
# bytes of a weight, on average, beyond which the library's products are faster by more than their launches
MOST_BYTES = 32 << 20
# of x and the weights
DTYPES = (torch.bfloat16, torch.float16)
