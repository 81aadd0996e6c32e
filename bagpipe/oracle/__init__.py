"""The oracle: knows the coming batches, so it decides what the cache fetches, keeps and evicts. Pure numpy.

batch ─> index.Indexer ──unique rows──> handles (row -> small number)
                                           │
         window.NextUses <── enter / leave ┤            direct.DirectPlanner: no cache
         eviction.EvictionQueue <── ranks ─┘
                                           v
         planner.Planner ──────────> plan.CachePlan ──> verify.Verifier (independent replay)
"""
