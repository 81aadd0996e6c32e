"""Replay: a log goes through the real oracle, and through other policies, without training: what would be fetched?

LookaheadLoader ─batches─> RowCounter: numbers rows, counts accesses ─rows of each batch─> RowBatchFile (a file)
        │                                                                                │
        └─> Planner, one per setting ─CachePlan─> counts          baselines: LRU, LFU, offline Belady, static hot
                                 └──────────────> ReplayRecord <────────────────────────┘
records, skew, trials ─> out.json, out.html
"""
