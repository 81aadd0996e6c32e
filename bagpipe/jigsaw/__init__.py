"""Several training jobs on one set of ranks, simulated: which worker runs where and when. Pure: no torch, no threads.

job_file  TOML ──> TrainingJob of each
job       TrainingJob: workers, seconds of forward and backward, shares of partial backwards, exchange of gradients
policy    fifo, fair, edf, jigsaw: who holds a rank for how long, and who is next
simulate  jobs, ranks, policy ──> Timeline
timeline  Timeline: pieces (a worker's forward and backward of an iteration) and exchanges, with their times
outcome   Timeline ──> finish, deadline, share of the backward done; utilisation of ranks, efficiency of the cluster
picture   Timeline ──> text, SVG
report    Timelines ──> one HTML file
"""
