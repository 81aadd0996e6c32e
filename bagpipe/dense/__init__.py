"""The dense part of a model on one rank: executors of forward, loss and backward; precision; loss.

    inputs ──lookups──> vectors ──model──> logits ──> loss sum         `EagerExecutor`: operator by operator
                                                                        + autocast, loss scale (`Precision`)
    inputs ──lookups──> values ──dense stage, maybe compiled──> …      `SplitExecutor`: lookups and stage apart
    inputs ──lookups──> values ──copy──> buffers ──CUDA graph──> …     `CudaGraphExecutor`: the stage captured once
    a user's batch ──model, lookups inside──> loss, outputs            `LossExecutor`: the model has its own loss

Configuration and batch size alone decide which executor computes a batch, so a job gives the same bits with and without
a cache, resumed or not. `bagpipe.training.whole_dense` makes a part of the training loop of an executor, and `parallel`
sums gradients over ranks.

chunks/: memory of the dense part under a byte budget.

lamb: an optimizer that torch lacks. clip: limits of gradients.
compiler: torch.compile. leaf_call: calls of its code with stored weights. saved_values: what their backwards read.
loss_scale: its growth. seeding: random numbers of a forward. stage_module: a stage's autocast.
versioned_call: a forward and backward with other weights than the parameters.
"""
