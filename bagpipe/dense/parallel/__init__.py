"""Data parallelism of the dense part: gradient all-reduce and parameter broadcasts.

replicated   whole model: gradients in buckets, summed while the backward runs
stage_sums   pipeline stages: gradients summed over the ranks that hold the stage
broadcast    equal parameters and buffers on all ranks, before and after training
"""
