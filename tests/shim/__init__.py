"""Runs users' training scripts unmodified, with or without GPUs, and records what they did."""
