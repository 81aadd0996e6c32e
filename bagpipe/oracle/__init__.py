"""The oracle: plans which rows the caches fetch, keep and evict, from a window of coming batches. Pure numpy.

batch ─> batch_indexer: index ─> assign (example -> rank) ─> rank_index (each rank's unique rows)
            │ unique rows                                        │
         handles (row -> dense integer)                          │
            v                                                    │
         window.NextUses ──next uses, uses by rank──> placement  │          direct.DirectPlanner: no cache
            │                                          │ owners  │
         resident_set.ResidentSet, one per rank <──────┘         │
            │ eviction.EvictionQueue, far_queue, lrfu            v
            └─────────────> planner.Planner ─────────> assembly: plan.CachePlan ──> verify.Verifier (tests)
                                                                     └──> rank_batch.RankBatch: one rank's part

batch_window: handles and next uses of the batches ahead, in the planner's thread or in one before it.
shard: the index in shards, by table, and their results joined.
spec_check: specs that cannot be planned for. capacity: the error of a batch that does not fit. sizing: the bound of a
cache that grows.
admission: replaces ids of rows with too few uses before all of this; use_counts counts them. expiry: rows that no batch
has used for long are deleted and begin anew; lifetimes follows their last uses, table_rows finds the rows of a batch by
tables of the data, and expired puts them into plans. plan_arrays: dtypes and lengths of a plan's arrays.
last_uses: how long ago a log used each row, for reports and compaction.
versions: how often each row has been updated, for checks of fetched rows.
"""
