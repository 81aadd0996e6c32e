"""The oracle cacher: reads the data, plans with lookahead, and sends every rank its batches.

data.loader ──Batch──> oracle.planner ──CachePlan──> planning.PlannedData ──RankBatch──> service ──gRPC──> trainer
                                                                   (embedded: one daemon for one job)

server, security   listener, limits, authentication       service, requests   one stream per rank, checked input
jobs, run          ranks and runs of every job            planning            plans of one run
identity           hashes of files and code               embedded            the daemon of one job
cli, process       the daemon's process                   logs, counters, metrics   JSON lines, totals, Prometheus
"""
