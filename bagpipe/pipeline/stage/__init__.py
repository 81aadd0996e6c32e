"""The dense part of a model as stages: cut from a model, measured, and run action by action.

model ──trace──> FX graph ──split──> staged.StagedModel: an embedding stage, stage modules, the values between them
                    └─measure──> partition.OperatorGraph                  │
StepProgram ──────────────────────────────────────────────────────> runtime.StageRuntime: handlers of F, B, I, W, …
                                                                          │ links: values to and from other ranks
"""
