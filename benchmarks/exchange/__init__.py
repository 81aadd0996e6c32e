"""Bytes that the ranks of a job exchange per batch, and those of them that a step must wait for.

accounting   plans and batches -> rows per batch of each way to exchange them
workload     named data sets, window and cache sizes
main         workloads x ways x ranks -> results.json, tables (Markdown)
"""
