"""The dense part of a model as pipeline stages: measurement and execution.

model ──trace──> FX graph ──split──> staged.StagedModel: an embedding stage, stage modules, the values between them
                    └─measure──> partition.OperatorGraph                  │
StepProgram ──────────────────────────────────────────────────────> runtime.StageRuntime: handlers of F, B, I, W, …
                                                                          │ links: tensors to and from other ranks
"""
