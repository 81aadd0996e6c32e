"""What do the delayed and predicted weights of asynchronous schedules cost in quality, and what do they win in time?

quality      one training job ──> AUC and log loss on held-out examples over time, in processes of their own
sources      its data: Criteo's click logs, synthetic ones, synthetic ratings like MovieLens' (ratings)
distance     predicted, stale and actual weights of a job, per stage and batch
throughput   simulated time of a batch in the steady state, with and without waiting for rows
varying      simulated time of a batch where the times of actions vary, of `dynamic` too
ranks        jobs on two ranks: measured and simulated time of a step
dense_ranks  the dense part alone on two ranks
main, records, report, pictures     parts, what is taken from their records, tables, pictures
"""
