"""The data of schedules.

Op (ops) <──op── Action (actions) ──in order──> lanes of a Program ──Graph──> all dependencies
Template ──in order──> lanes of a Loop ──unroll──> Program          StageGraph ──dense_program, dense_loop──> either
Loop ──version_lags──> VersionLags per stage: the weights of a batch in an asynchronous schedule
BackwardShares: which stages compute the backward of which micro-batches, where backwards are partial
StepProgram: the Program of a training step with its stage instances and embedding stages
"""
