"""Data parallelism of the dense part: gradient all-reduce and parameter broadcasts."""
