"""Piper's published inputs and optima against our program. See README.md."""
