"""The gated delta rule (Yang et al. 2025): a state decays, then adds, for each key, the error of the value it recalls.

README.md derives the algorithm and defines the letters (Ã, b, γ, Γ, R, …) that its modules use.
"""
