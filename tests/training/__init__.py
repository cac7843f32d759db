"""Real training runs on a few CPU processes, the source of checkpoints whose content is known."""
