"""The training loop as a sum of parts. `Engine` composes them; each file below is one part.

    reading         X_READ    next batch and plan, index tensors and model inputs      lane data
    rows            X_FETCH   rows from the store                                      lane net-in
                    X_EVICT, X_INSERT   rows that leave, rows that come                lane copy
                    X_NORM, X_UPDATE   norm of row gradients, a step per row           lane compute
                    X_WRITEBACK   rows that left, to the store                         lane net-out
    row_exchange    X_PREPULL, X_PULL, X_PUSH, X_PUSH_LATE, X_NORM, X_UPDATE_LATE, X_ACK       lanes pull, push, ack
    whole_dense     F, B, OPT of the whole model; of micro-batches, with micro_lookups  lane compute
    staged_dense    the actions of a StepProgram                                       lanes compute<k>, reduce<p>
    preconditioning COV_A, COV_G, X_INV, PRECOND, … of K-FAC, and its state            their lanes
    evaluation      F         scores                                                   lane compute
    nonfinite, lookup_guard, learning_rates, row_decay, weight_average, earlier_rows, checkpointing, totals: work
                    before and after others' actions
    verification: the first batches against a serial_reference (serial_kfac); batch_records: what ranks saw of them
    plateau: a factor of learning rates that follows evaluations
    current_rows: rows for evaluations at rest; absent_rows: those that the store does not have
    whole_kfac: which layers of a whole model a rank owns; stage_layers: where those of stages are computed

A batch under way is one `InFlightBatch`; parts pass their results on through it. The edges of the composed loop and the
plan's hazards decide which lane does what when; no part does.

dense: what all dense parts have in common; stage_losses: sums of losses by stage.
weights, chunked_weights: who holds, sums and steps the parameters of the whole model, and where.
agreement: what all stages of all ranks know of a batch before one of them steps.
row_steps: settings of a batch's row updates, of row optimizers by table.
engine: composes and runs the parts. stepped_run, stepped_evaluation: runs whose steps the caller takes.
progress: results of a run. digest: its final state as hashes.
"""
