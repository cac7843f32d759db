"""The index of pycocotools, for annotations in memory."""
