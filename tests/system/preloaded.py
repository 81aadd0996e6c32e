"""Modules that the fork server imports once for all jobs forked from it."""

from __future__ import annotations

import gc
import importlib

for name in ("bagpipe.store.redis.store", "torch.distributed.run", "trainer.cli", "trainer.job"):
    importlib.import_module(name)

# Without this, every garbage collection in a forked process copies the pages of all imported modules.
gc.collect()
gc.freeze()
