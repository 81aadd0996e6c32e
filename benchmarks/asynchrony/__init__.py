"""What do the delayed and predicted weights of asynchronous schedules cost in quality, and what could they win in time?

quality      one training job ──> AUC and log loss on held-out examples over time, in processes of their own
distance     predicted, stale and actual weights of a job, per stage and batch
throughput   simulated time of a batch in the steady state, with and without waiting for rows
main, report parts, tables, curves
"""
