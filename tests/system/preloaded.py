"""Modules that the fork server imports once for all jobs forked from it."""

from __future__ import annotations

import gc
import importlib

_TRAINER = ("bagpipe.store.redis.store", "numpy.ma", "torch.distributed.run", "trainer.cli", "trainer.job")
_CACHER = ("cacher.cli", "data.criteo", "data.csv", "data.parquet", "data.synthetic")
for name in _TRAINER + _CACHER:
    importlib.import_module(name)

# Without this, every garbage collection in a forked process copies the pages of all imported modules.
gc.collect()
gc.freeze()
