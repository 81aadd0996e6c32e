"""Training recommendation models whose embedding tables live in a remote store, exactly.

batches ──> oracle ──CachePlan──> pipeline: fetch ─> insert ─> forward/backward ─> update ─> store
"""

__version__ = "0.1.0"
