"""The oracle: knows the coming batches, so it decides what the caches fetch, keep and evict, and where. Pure numpy.

batch ─> intake: index ─> assign (example -> rank) ─> split (each rank's unique rows)
            │ unique rows                                        │
         handles (row -> small number)                           │
            v                                                    │
         window.NextUses ──next uses, uses by rank──> placement  │          direct.DirectPlanner: no cache
            │                                          │ owners  │
         residents.Residents, one per rank <───────────┘         │
            │ eviction.EvictionQueue                             v
            └─────────────> planner.Planner ─────────> assembly: plan.CachePlan ──> verify.Verifier
                                                                   (independent replay: form, versions)
"""
