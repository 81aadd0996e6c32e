"""The training program: `python -m trainer`, or one process per rank under torchrun.

config ─> cacher process ──schema──> models ─> convert ──> Engine ──steps, rows──> trained model
                 └──────────────steps──────────────────────┘ └── store
after training: metrics (AUC, NE) ─> digests ─> result JSON
"""
