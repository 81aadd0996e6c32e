"""Modules that the fork server imports once for all jobs forked from it."""

from __future__ import annotations

import gc
import importlib

_TRAINER = ("bagpipe.store.redis.store", "numpy.ma", "torch.distributed.run", "trainer.cli", "trainer.job")
_CACHER = ("cacher.cli", "data.criteo", "data.csv", "data.parquet", "data.synthetic")
#: What the modules of tests import, which ranks import for their function: a quarter of a second for each rank.
_TESTS = (
    "hypothesis.extra.numpy",
    "pytest",
    "tests.cacher.daemons",
    "tests.distributed.processes",
    "tests.system.jobs",
)
for name in _TRAINER + _CACHER + _TESTS:
    importlib.import_module(name)

# Without this, every garbage collection in a forked process copies the pages of all imported modules.
gc.collect()
gc.freeze()
