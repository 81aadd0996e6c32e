"""When do second-order steps pay? K-FAC against Adagrad and AdamW.

contestants   optimizers, and the settings that are tried of each
quality       NE of held-out examples along training: tries, then runs with the chosen settings     sources: asynchrony
job           one training job, in this process or in several: clock (times without evaluation), meter (bytes of K-FAC)
steps         time of a step on one and two ranks
costs         bytes and operations by formula, of the layers of `shapes`
main, report  parts, tables
"""
