"""The dense part of a model as pipeline stages: measurement and execution.

model ──trace──> FX graph ──split──> staged_model.StagedModel: embedding stage, stage modules, the values between them
                    └─measure, roofline, linear_layers──> OperatorGraph   │
StepProgram ──────────────────────────────────────────────────────> runtime.StageRuntime: handlers of F, B, I, W, …
                                                                          │ links: tensors to and from other ranks

dense_pipeline    one rank's stages and links             mesh              ranks that hold a stage
stage_weights     what a stage steps, and when it is whole
chunked_stages    the same in chunks under a byte budget, by chunk_lane; chunked_versions
instance          actions of one stage in one pipe          embedding_stage   one lookup and backward per batch
channel           tensors between two stages                batches           examples of each micro-batch
backward          whole, or inputs and weights apart
activations       to the host, between F and B              stage_parameters  gathered and released, if divided
stage_versions    weights kept by asynchronous schedules
partial_backward  backwards that are left out, and the factors of the gradients of the others
graphs, cuda_graph captures; the whole model by them    recorded_stage    forward and backward of a stage, captured
recorded_instance forwards of a stage instance by recordings
prediction        weights some optimizer steps ahead        serial_versions   training by the table, in one thread
"""
