"""The gated delta rule (Yang et al. 2025): a recurrence that decays its state and writes the errors of its recall."""
