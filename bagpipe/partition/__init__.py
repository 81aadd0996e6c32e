"""Partitioner: assigns a model's operators to stages and devices by their costs. Pure: no torch, I/O or threads.

operator, operators ──OperatorGraph + cost: Cluster──> CostModel ──Problem──> one of `planners` ──> Found ──> plan
    search     GraphPipe: cuts (all partitions of a small graph), series_parallel on the tree of `decompose`
    pipedream  chains on hosts: chain (one level), two levels, ranges of unlike devices
    alpa       chains on submeshes: the sum of stages and the longest          piper  downsets, for small graphs
               intra_operator: how each stage divides its operators (splits: the ways and their costs)
plan    candidates: simulates what was found (predict: the schedule, with the network) ──> result: the shortest step
                                                                          └──> plan_file: the plan as TOML, for jobs
bisect  target time ──> least bottleneck, for searches that answer whether a time is possible
"""
