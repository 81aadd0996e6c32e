"""Gradients and parameters of the dense part across ranks."""
