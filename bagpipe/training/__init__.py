"""The phases of an engine, training and evaluation: what each action of the loop does.

    X_READ   take the next Step, make its index tensors and model inputs      lane data
    X_FETCH    read its rows from the store                                     lane net-in
    X_EVICT  copy the leaving rows out of their slots                         lane copy
    X_INSERT    put the fetched rows into their slots                            lane copy
    F, B     forward, loss, backward                                          lane compute
    X_UPDATE one row-optimizer step per row; OPT: one dense step              lane compute
    X_WRITEBACK  write the rows that left                                         lane net-out

and with several ranks, whose caches hold different rows (`bagpipe.cache.row_exchange`):

    X_PREPULL, X_PULL            rows from their owners                       lane pull
    X_PUSH, X_PUSH_LATE, X_UPDATE_LATE   row gradients to their owners        lane push
    X_ACK    every rank has written the rows that left                        lane ack

and with the dense part in stages (`bagpipe.pipeline.stage`):

    X_EMBED, X_EMBED_GRAD         rows to the vectors that stages take, and back   lane compute…
    F, B, I, W, SEND_…       the stages' own actions                          lane compute…
    REDUCE_GRAD, OPT         per stage                                        lanes reduce…, compute…

A batch under way is one `InFlightBatch`; handlers pass their results on through it. Which
lane may do what when is decided by the loop's edges and the plan's two hazards, never here.
"""
