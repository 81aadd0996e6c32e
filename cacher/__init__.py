"""The oracle cacher: reads the data, plans with lookahead, and sends every rank its batches.

data.loader ──Batch──> oracle.planner ──CachePlan──> planning.PlannedData ──RankBatch──> service ──gRPC──> trainer
                                                                   (embedded: one daemon for one job)

jobs that bring their own batches: ids ──> plan_service ──> plan_stream: a planner thread ──plans──> trainer

server, security   listener, limits, authentication       service, requests   one stream per rank, checked input
jobs, run          ranks and runs of every job            planning, planned_phase   plans of one run
shards, shard_link cachers that index tables for this one shard_service, shard_stream  this one as such a shard
sharded_phase, ahead   one phase from all shards; a thread that iterates ahead of another
plan_service, plan_stream, plan_requests                  planners of batches that trainers bring; checked input
calls, admission   first messages, errors; number of jobs embedded            the daemon of one job
identity, known_rows   hashes of files and code; names of rows   cli, process   the daemon's process
logs, counters, metrics   JSON lines, totals, Prometheus
"""
