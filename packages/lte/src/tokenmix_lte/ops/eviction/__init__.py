"""One decoding step of eviction, and the eviction times of whole sequences."""
