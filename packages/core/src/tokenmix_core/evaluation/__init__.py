"""Evaluation of any causal language model: suites by name, offline or through lm-eval, and reports."""
