"""The launch cache: the CPU work between a call and its kernel launches is done once per signature.

Sizes, tiles, strides and buffers follow from the arguments' shapes, and computing them in Python takes longer than the
launches. So a call is captured (`capture`): which buffers it allocates, and which kernels it launches on them.
Later calls with its signature are replayed (`replay`) by generated code (`codegen`) that does nothing else.

A capture takes longer than a run, and lengths may never recur. So a call is captured at once only if its sizes have new
bit lengths or recent captures are replayed often; else only if its signature recurs, and after more occurrences if
earlier captures were not replayed (`admission`). The number of cached calls is bounded. The capture of a row operation
serves all batch sizes and lengths (`row_calls`).
"""
