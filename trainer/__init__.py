"""The training program: `python -m trainer`, or one process per rank under torchrun.

config ─> cacher process ──schema──> models ─> convert ──> bagpipe.jobs: JobSession ──steps, rows──> trained model
                 └──────────────planned batches────────────┘ └── store
after training: metrics (AUC, NE, …) ─> digests ─> result JSON

cli, process       the program and its process            job, open_job        one job: run it, open its parts
services           cacher and store                       assembly             model, cache, dense part, engine
inputs, dense, optimizers, stages, shards, devices, settings, model_check: from configuration to objects, and checks
cache_size         rows of a cache: given, or of memory and tables
metrics, groups, ranking, tasks, totals, result           AUC and others by label, sums over ranks, the JSON
precondition       K-FAC of the stages: layers, owners, work and its costs
orders, recompute  orders that ranks chose: written, and repeated; the micro-batches that are recomputed
evaluation, held_out, early_stop  scores during training  export, export_source  a checkpoint for serving
scoring, score_file     `trainer eval` and `trainer predict`: scores with a checkpoint's model
rows, row_report, row_ages      `trainer rows`: what a namespace holds, and a checkpoint without old rows
observe            progress, logs, trackers, Prometheus
"""
