"""One format, one file. The registry finds them here; none is listed by hand."""
