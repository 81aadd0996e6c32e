"""Scaling curves of planning and training. See README.md."""
