"""The scorer: a retention logit for each key, computed from the tokens around it."""
