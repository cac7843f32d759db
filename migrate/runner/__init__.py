"""Runs one process of a user's training from outside, unmodified, and records what it did.

Started as a child process by `migrate.verify`, never imported by it: this package imports torch and
changes it for the whole process.
"""
