"""The scores by which keys are kept: what tokens within a few places of a key say about it."""
