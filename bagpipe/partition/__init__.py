"""Partitioner: assigns a model's operators to stages and devices by their costs. Pure: no torch, I/O or threads.

operators ──OperatorGraph──> decompose ──SPTree──> series_parallel (GraphPipe) ─┐
                         └─> cuts (exact) ─┬─> search ──layouts──> plan ──> result
                         └─> chain (PipeDream, Alpa) ─┘               └─ predict: the schedule, simulated
                                                               result ── plan_file: the plan as TOML, for jobs
cost: the cost model of all searches        bisect: target time -> least bottleneck
"""
