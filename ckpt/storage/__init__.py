"""Bytes in one container: torch's zip and legacy files, safetensors, DCP items. No formats."""
