"""Throughput of the store against the server's own limit. See README.md."""
