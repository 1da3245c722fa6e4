"""Tuples that the warpgroups of the forward kernel exchange."""

from collections import namedtuple

# shared memory of a stage: q, k, v, Ã and the gate vectors
Tiles = namedtuple("Tiles", "q k v a gates")
# shared memory of S and R of the current chunk, which the scan writes and the epilogue reads
Results = namedtuple("Results", "s r")
# the producer's barriers: one full and one empty barrier per stage
Pipeline = namedtuple("Pipeline", "full empty")
# the scan's barriers: one full and one empty barrier per stage; for S and for R one barrier "stored" and one "read"
Barriers = namedtuple("Barriers", "full empty states residuals")
# rows: tokens from the first scanned chunk to the sequence's end; chunks: scanned chunks; before: how many of the
# scanned chunks precede the segment; their results are not stored
Span = namedtuple("Span", "rows before chunks")
# flags, constexprs: q is normalised; outputs are computed; S and R are saved for the backward pass
Options = namedtuple("Options", "l2norm output save")
