"""How many bytes do the ranks of a job exchange per batch, and how many of them must a step wait for?

accounting   plans and batches -> rows per batch of each way to exchange them
workload     named data sets, window and cache sizes
main         workloads x ways x ranks -> results.json, tables (Markdown)
"""
