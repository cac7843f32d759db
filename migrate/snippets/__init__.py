"""Definitions that are written into the user's scripts.

These files are read as text and never imported by the rewriter. `common.py` serves every target; a
target adds its own file. Plain functions without annotations, as such scripts are written; each
states what its caller has to know.
"""
