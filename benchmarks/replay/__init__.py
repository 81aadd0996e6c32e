"""Throughput of a log replay. See README.md."""
