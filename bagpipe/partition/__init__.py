"""Partitioner: from a model's operators and their costs to stages on devices. Pure: no torch, no I/O, no threads.

operators ──OperatorGraph──> decompose ──SPTree──> series_parallel (GraphPipe) ─┐
                         └─> cuts (exact) ─┬─> search ──layouts──> plan ──> result
                         └─> chain (PipeDream, Alpa) ─┘               └─ predict: the schedule, simulated
cost: what a stage costs, for all of them      bisect: target time -> least bottleneck      exhaustive: the oracle
"""
