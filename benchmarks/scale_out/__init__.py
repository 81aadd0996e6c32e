"""A planner in shards, projected from measured costs."""
