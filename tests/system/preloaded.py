"""What a fork server imports, once, for all jobs that are forked from it: whatever any of them would import itself.

More than half of a small job's second of work was importing what its AUC is computed with.
"""

from __future__ import annotations

import gc
import importlib

for name in ("bagpipe.store.redis.store", "sklearn.metrics", "torch.distributed.run", "trainer.cli", "trainer.job"):
    importlib.import_module(name)

# Else every collection in a forked process copies the pages of all that was imported.
gc.collect()
gc.freeze()
