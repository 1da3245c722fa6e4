"""Corpora: the byte tokenizer, token files, what they are made from, and the built-in corpus."""
