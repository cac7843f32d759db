"""The ways to train that scripts can be moved to, one file each."""
