"""`Job`: what a job trains on one rank, and where its rows and checkpoints are. Pure settings; `open_job` opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.row_cache import RowCache
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.dense.parallel.broadcast import HeldStage, RankBuffers
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.ranks import Ranks
from bagpipe.kernels.select import select_kernels
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store
from bagpipe.training.dense import DensePart
from bagpipe.training.engine import EngineSettings
from bagpipe.training.part import LoopPart
from bagpipe.training.reading import PrepareInputs
from bagpipe.training.rows import RowStepsOfBatch
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import RowSchema

__all__ = ["Job", "MakeClaim", "MakeDense", "RankDense", "take_claim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDense:
    """The dense part on one rank.

    Attributes:
        dense: trains it.
        parts: further parts of the training loop.
        replicas: makes its buffers equal on all ranks; None: one rank, or stages.
        held: its stages and the ranks that hold them; empty on one rank and without stages.
    """

    dense: DensePart
    parts: tuple[LoopPart, ...] = ()
    replicas: RankBuffers | None = None
    held: tuple[HeldStage, ...] = ()


#: Makes the dense part of a rank whose collections read from a cache. The stack closes what it opens.
MakeDense: TypeAlias = Callable[[RowCache, Ranks, ExitStack], RankDense]

#: Claims the namespace, once every rank has its first batch; True if it held no rows before. Collective.
MakeClaim: TypeAlias = Callable[[Ranks, Store, Checkpoints, RowCache], bool]


def take_claim(ranks: Ranks, store: Store, checkpoints: Checkpoints, cache: RowCache) -> bool:
    """The claim of a job that brings no rows of its own, at its first run."""
    return not checkpoints.claim.is_taken and checkpoints.claim.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's view of a job.

    Attributes:
        model: what is trained.
        layout: how its lookups are grouped.
        bind: makes its collections read from a cache.
        rows: schema of its rows.
        device: of the model.
        num_slots: slots of this rank's cache; 0: direct mode.
        grows: the cache begins with fewer slots, see `OracleSpec.grows`.
        is_partial: some backwards are left out, see `RowCache`.
        kernels: of the cache, see `bagpipe.kernels.select`.
        engine: numbers of the engine.
        store: the store; its URL is not empty.
        checkpoint: the folder of checkpoints, and how often they are made.
        peer_timeout_s: deadline of one exchange between ranks.
        make_dense: makes the dense part.
        prepare: makes a batch's inputs; called in the data lane.
        row_steps: settings of row updates; None: those of `engine`.
        settings: settings that affect results, by name; JSON values.
        defaults: see `JobFacts`.
        identity: of the data; None: unknown.
        claim: claims the namespace.
        clears_refused: see `bagpipe.jobs.claim.Claim`.
        trace: records every action.
        wake: called when a run has failed, see `Engine`.
        await_batch: of a stream, see `Engine`.
    """

    model: nn.Module
    layout: LookupLayout
    bind: Callable[[RowCache], object]
    rows: RowSchema
    device: torch.device
    num_slots: int
    grows: bool = False
    is_partial: bool = False
    kernels: str = "auto"
    engine: EngineSettings
    store: StoreConfig
    checkpoint: CheckpointConfig
    peer_timeout_s: float
    make_dense: MakeDense
    prepare: PrepareInputs
    row_steps: RowStepsOfBatch | None = None
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    identity: BatchIdentity | None = None
    claim: MakeClaim = take_claim
    clears_refused: bool = True
    trace: Trace | None = None
    wake: Callable[[], object] | None = None
    await_batch: Callable[[float], bool] | None = None

    def new_cache(self) -> RowCache:
        """An empty cache for the rows."""
        return RowCache(
            self.rows,
            self.num_slots,
            self.device,
            prefetch_depth=self.engine.prefetch_depth,
            kernels=select_kernels(self.rows, self.device, self.kernels),
            batches_begun=1 + self.engine.rows_delay,
            grows=self.grows,
            is_partial=self.is_partial,
        )
