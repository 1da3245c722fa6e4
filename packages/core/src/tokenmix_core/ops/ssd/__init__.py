"""State-space duality (SSD; Dao and Gu 2024): a linear recurrence with a decay for each token and head.

README.md derives the algorithm and defines the letters (b, Γ, P, dP, M, …) that its modules use.
"""
