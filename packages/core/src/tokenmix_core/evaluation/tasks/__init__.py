"""Task files for lm-eval, and the functions that they name."""
