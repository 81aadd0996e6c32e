"""A job on its ranks: its claim on a namespace, the checkpoint it starts from, and those that it makes.

    Ranks ──check_same──> all ranks agree          arithmetic_of, settings ──> JobFacts
    JobFacts, folder, store ──start_generation──> ResumePoint ──Claim──> the store's rows are those of the checkpoint
    Job ──open_job──> OpenJob: store, cache, dense part, Checkpoints, engine ──JobSession──> runs, one after another
    between two steps: evaluation_run, with a cache, lanes and messages of its own
    training ──Checkpoints──> folder, store        at the end: RowCheck, Claim.finish

`bagpipe.checkpoint` has the files and the protocol; this room puts them together for a training loop.
`python -m trainer` and `bagpipe.TrainPipeline` both train by a `JobSession`.
"""
