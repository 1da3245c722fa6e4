"""The gated delta rule (Yang et al. 2025): a recurrence whose state decays and adds each value's recall error.

README.md derives the algorithm and defines the letters (Ã, b, γ, Γ, R, …) that its modules use.
"""
