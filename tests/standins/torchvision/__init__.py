"""Some of torchvision's classes, with its constructors and attributes but without its data.

For a Python whose torchvision is missing, or made for another build of torch: this folder's parent
goes to the end of the path, so the real one comes first.
"""

from torchvision import datasets

__all__ = ["datasets"]
