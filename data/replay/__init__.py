"""Replay: runs a log through the oracle and through baseline policies, without training, and counts fetched rows.

LookaheadLoader ─batches─> RowCounter: numbers rows, counts accesses ─rows of each batch─> RowBatchFile
        │                                                                                       │
        └─> Planner, one per setting ─CachePlan─> counts          baselines: LRU, LFU, offline Belady, static hot
                                 └──────────────> ReplayRecord <────────────────────────────────┘
        └─> SavingsCounter: thresholds and limits for rows
records (with skew), trials ─> out.json, out.html

cli, options: the program and its Sweep. scanned_log, log_tables: the log, its rows and tables. sweep: every setting;
passes: one of them, in any process. next_use_file: the next use of each row of the log, for belady-log.
plan_counts: counts from plans. savings: rows that admission and expiry would save. recommendation: the setting to use.
"""
