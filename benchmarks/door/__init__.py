"""Cost of `bagpipe.TrainPipeline` against the training program's own loop, for the same model, batches and store.

main ──Task as JSON──> trial: one fresh process per contender and repeat ──Outcome──> tables
"""
