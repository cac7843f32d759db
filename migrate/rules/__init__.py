"""The patterns that the rewriter knows, one file each."""
