"""The oracle cacher: reads the data, plans with lookahead, and sends every rank its batches.

data.loader ──Batch──> oracle.planner ──CachePlan──> planning.PlannedData ──RankBatch──> service ──gRPC──> trainer
                                                                   (embedded: one daemon for one job)
"""
