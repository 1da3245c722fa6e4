"""A decoding step of a Gated DeltaNet layer, from its input projections to its output projection."""
