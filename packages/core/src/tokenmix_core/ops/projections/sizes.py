"""Which calls the kernel takes."""

# rows of x: a program has all of them
MOST_ROWS = 64
MOST_WEIGHTS = 6
