"""Linear layers of one input in one launch."""
