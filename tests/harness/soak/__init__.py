"""Soak: one long job with checkpoints whose resource use must not grow.

trainer ranks, daemon, store ──every 10 s──> Sample ──after the warm-up──> Trend (median slope) ──> flat, or grows

python -m tests.harness.soak --seconds 3600 --ranks 1 --json soak.json
"""
