"""The dense part of a model on one rank, whole: forward, loss, backward, in the numbers and the way that are asked for.

    inputs ──lookups──> vectors ──model──> logits ──> loss sum        `EagerExecutor`: as the model says
                                                                       + autocast, loss scale (`Precision`)
    inputs ──source──> values ──dense stage, maybe compiled──> …      `SplitExecutor`: lookups apart from the rest
    inputs ──source──> values ──copy──> buffers ──a recording──> …    `CudaGraphExecutor`: the rest as a CUDA graph

Which of them computes a batch is a function of the configuration and the batch's number of examples, never of what came
before: so a job gives the same bits with and without a cache, resumed or not, whatever it is asked to use. A loss scale
that grows is told to them with each batch; training keeps it, and checkpoints do.
"""
