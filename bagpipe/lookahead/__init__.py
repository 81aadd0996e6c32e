"""Planners of batches that the training process brings, such as those of a user's data loader.

    batches ──next──> Batch (ids only) ──window of `lookahead` batches──> CachePlan ──> RankBatch, with the same Batch

    interface        `BatchPlanner`: what an engine's data lane calls. `WindowPlanner`: plans global batches
    inline           `InlinePlanner`: in the calling thread
    planning         order of batches, and of errors; capacity
    planner_process  `PlannerProcess`: in a process without torch (`child`), ids and plans by shared memory
                     (`link`: bytes; `frames`, `ids`: what they are; `protocol`: who says what when)
    remote           `RemotePlanner`: in a running cacher, over gRPC (`stream_link`; `pieces`: frames that fit messages)
    ranked           `RankedPlanner`: ranks bring their own batches, rank 0 plans for all (`transport`)
    select           `select_planner`: one of these, by name or address

A cacher (`bagpipe.client`) can also read files itself, and send batches with their plans.
"""
