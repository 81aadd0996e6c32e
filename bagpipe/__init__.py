"""Training recommendation models whose embedding tables live in a remote store, exactly.

batches ──> oracle ──CachePlan──> pipeline: fetch ─> insert ─> forward/backward ─> update ─> store

    with bagpipe.TrainPipeline(model, optimizer, rows=bagpipe.optim.Adagrad(lr=0.02)) as pipeline:
        for outputs in pipeline.train(loader):
            ...

`TrainPipeline`, `KfacOptimizer` and `serving` are imported on first use: ``import bagpipe`` alone needs neither torch
nor torchrec.
"""

from __future__ import annotations

import importlib
from typing import Any

from bagpipe import optim
from bagpipe.errors import CapacityError, InputError, JobError, PeerError, StoreError

__version__ = "0.1.0"

#: Public names that are imported on first use, and their modules.
_ON_FIRST_USE = {
    "Cacher": "bagpipe.client.access",
    "KfacOptimizer": "bagpipe.dense.precondition.optimizer",
    "TrainPipeline": "bagpipe.train_pipeline.pipeline",
}
#: Public modules that are imported on first use.
_MODULES = ("serving",)

__all__ = [
    "Cacher",
    "CapacityError",
    "InputError",
    "JobError",
    "KfacOptimizer",
    "PeerError",
    "StoreError",
    "TrainPipeline",
    "optim",
    "serving",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"bagpipe.{name}")
    if name in _ON_FIRST_USE:
        try:
            module = importlib.import_module(_ON_FIRST_USE[name])
        except (ImportError, OSError) as error:  # OSError: a library that does not load
            from bagpipe.util.environment import check_import

            check_import(error)
            raise
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
