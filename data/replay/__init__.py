"""Replay: runs a log through the oracle and through baseline policies, without training, and counts fetched rows.

LookaheadLoader ─batches─> RowCounter: numbers rows, counts accesses ─rows of each batch─> RowBatchFile
        │                                                                                       │
        └─> Planner, one per setting ─CachePlan─> counts          baselines: LRU, LFU, offline Belady, static hot
                                 └──────────────> ReplayRecord <────────────────────────────────┘
records, skew, trials ─> out.json, out.html
"""
