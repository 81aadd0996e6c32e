"""Throughput of the oracle. See README.md."""
