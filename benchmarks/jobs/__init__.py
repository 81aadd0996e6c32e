"""Conversion and replay in several processes. See README.md."""
