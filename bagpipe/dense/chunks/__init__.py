"""Memory of the dense part by chunks: parameters, gradients and optimizer state under a byte budget of the device.

    parameters ──ChunkLayout──> chunks of one size         modules, optimizer ──> moments: which chunks each one uses
    moments of one batch ──plan_moves──> MovePlan: (moment, chunk, to device | to host) ──simulate──> time lost
    hooks of modules and gradients ──Walker──> Arena: slots on the device, home buffers on the host, a copy lane

Every chunk has a home on the host. The device has as many slots as the budget has chunks, so the budget holds at every
moment by construction. The order of one batch is recorded; from then on chunks move ahead of their use, and the chunk
with the farthest next use leaves, as rows leave the cache. Where a chunk lies changes no bit: kernels see the same
values at the same alignment.

budget: the chunks of what a lane computes, and its part of the budget. layout: tensors in chunks. moments: uses of
chunks. moves: the plan of a batch's moves, by next use. simulate: its time. move_program: its actions. arena: slots and
homes. walker: the order that is walked, planned or on demand. units: modules whose parameters are used together, and
their moments. unit_hooks: calls of these modules. gradients: of a batch. state: tensors that optimizers keep.
chunked_model: what a lane computes and steps, in chunks.
"""
