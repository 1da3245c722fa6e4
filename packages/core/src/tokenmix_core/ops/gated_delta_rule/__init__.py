"""The gated delta rule (Yang et al. 2025): a state decays and then corrects the value that it recalls for a key.

README.md derives the algorithm and defines the letters (Ã, b, γ, Γ, R, …) that its modules use.
"""
