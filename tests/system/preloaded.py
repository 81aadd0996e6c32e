"""Modules that the fork server imports once for all jobs forked from it.

Importing the AUC's dependencies took more than half of a small job's second of work.
"""

from __future__ import annotations

import gc
import importlib

for name in ("bagpipe.store.redis.store", "sklearn.metrics", "torch.distributed.run", "trainer.cli", "trainer.job"):
    importlib.import_module(name)

# Without this, every garbage collection in a forked process copies the pages of all imported modules.
gc.collect()
gc.freeze()
