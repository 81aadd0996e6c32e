"""The training program: `python -m trainer`, or one process per rank under torchrun.

config ─> cacher process ──schema──> models ─> convert ──> Engine ──steps, rows──> trained model
                 └──────────────steps──────────────────────┘ └── store
after training: metrics (AUC, NE) ─> digests ─> result JSON

cli, process       the program and its process            job, open_job        one job: run it, open its parts
ranks, services    collectives; cacher and store          assembly             model, cache, dense part, engine
inputs, dense, optimizers, stages, devices: from configuration to objects
checkpoints, resume_point: resume, record, publish        claim                the store's namespace is this job's
job_facts          may a job resume a checkpoint?         arithmetic           what bits depend on besides settings
row_check          the store's rows, at the end           export               a checkpoint for serving
progress, metrics, totals, result                         progress bar, AUC, sums over ranks, the JSON
"""
