"""Embedding access behind computation, with the store at the far end of a 1 Gbit/s link.

workload   named models and data; their configurations
resident   compute only: the same batches, every row in device memory, no threads
trial      one job through the link: direct mode or a cache -> step times, waits, bytes
grid       workloads x grid x repeats, interleaved with compute-only runs -> records
report     records -> tables and plot
"""
