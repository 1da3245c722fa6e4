"""State-space duality (Dao and Gu 2024): a linear recurrence with a decay for each token and head."""
