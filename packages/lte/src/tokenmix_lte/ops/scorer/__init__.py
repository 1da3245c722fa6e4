"""The scorer: retention logits of keys, computed from the tokens around each key."""
