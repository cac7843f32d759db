"""Proof by training: the original and the candidate are run, and what they did is compared."""
