"""The gated delta rule (Yang et al. 2025): a linear recurrence that decays its state and corrects what it recalls."""
