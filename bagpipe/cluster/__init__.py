"""Clusters: what a job runs on, as data. Pure: no torch, I/O or threads.

network   Network: ports, bandwidths and latencies between ranks ──> times of messages and collectives
"""
