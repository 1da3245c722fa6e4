"""One eviction step of decoding, and eviction times of whole sequences."""
