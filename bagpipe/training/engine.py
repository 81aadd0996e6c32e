"""`Engine`: trains and evaluates a model on planned batches. Its parts are made by the caller; the work is `Phase`'s.

batches ──Training──> updated model, rows, store          batches ──Evaluation──> logits and labels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.upload import Uploader
from bagpipe.dense.executor import DenseExecutor, EagerExecutor
from bagpipe.distributed.interface import Peers
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.runner import Runner
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store
from bagpipe.training.evaluation import Evaluation, EvaluationOfRanks
from bagpipe.training.nonfinite import NonFinite
from bagpipe.training.pipelined import PipelinedTraining, PipelinedTrainingOfRanks
from bagpipe.training.progress import PhaseResult, Progress
from bagpipe.training.training import Training, TrainingOfRanks
from bagpipe.types.batch import Batch
from bagpipe.types.model_inputs import ModelInputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bagpipe.checkpoint.recorder import Recorder

    #: (table number, ids int64 ``[n]``) -> bool ``[n]``: the row was written before, so the store must have it.
    KnownRows = Callable[[int, NDArray[np.int64]], NDArray[np.bool_]]

__all__ = ["Engine", "EngineSettings", "PhaseResult", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Numbers the engine needs.

    Attributes:
        prefetch_depth: batches fetched ahead.
        read_ahead: batches read and not yet trained, at most.
        rows_lr, eps: of the row optimizer.
        nonfinite: what a loss or gradient that is NaN or infinite does: it stops the job before anything is changed by
            it, or its batch is left out (skip; not with stages).
    """

    prefetch_depth: int
    read_ahead: int
    rows_lr: float
    eps: float
    nonfinite: NonFinite = "stop"


#: (dense part in stages, several ranks) -> phase.
_TRAINING: Mapping[tuple[bool, bool], type[Training]] = {
    (False, False): Training,
    (False, True): TrainingOfRanks,
    (True, False): PipelinedTraining,
    (True, True): PipelinedTrainingOfRanks,
}


class Engine:
    """Runs phases of batches over one model, cache and store, all made by the caller and owned by it.

    Args:
        model: called as ``model(dense, sparse)``; its embedding modules read from `cache`.
        layout: how a batch is read (`Converted.layout`).
        cache: the rows; its streams are those of the lanes.
        store: open, its schema checked.
        optimizer: of the dense part.
        prepare: makes a batch's model inputs of what it uploads; called in the data lane.
        settings: numbers.
        trace: records every action.
        on_batch: called after every batch, in the compute lane, with a function that gives the totals so far.
        peers: the other ranks; None: there are none.
        pipeline: this rank's part of the dense stages; None: the model is trained whole.
        claim: makes the namespace this job's, once every rank has its first batch; True if it held no rows before.
            Called in the data lane. Default: the store's own.
        recorder: makes checkpoints of what is trained, and guards what is written; see `Recorder`.
        known: rows that a checkpoint holds, which the store must therefore have: one that is not found is a
            `LostRowError`. Rows that this process wrote are known without.
        settle: with several ranks that skip batches (`EngineSettings.nonfinite`): makes the dense gradients the sums
            over all ranks, and says whether any rank's batch is bad (`DenseParallel.settle`).
        wake: called when a phase has failed: ends the wait for a batch that may never come (`RemoteBatches.interrupt`).
        dense: how forward and backward of the dense part are done; with a `pipeline`, which has its own way, only its
            precision counts. Default: the model's own forward, as it is.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        layout: LookupLayout,
        cache: RowCache,
        store: Store,
        optimizer: torch.optim.Optimizer,
        prepare: Callable[[Batch, Uploader], ModelInputs],
        settings: EngineSettings,
        trace: Trace | None = None,
        on_batch: Callable[[Callable[[], Progress]], None] | None = None,
        peers: Peers | None = None,
        pipeline: DensePipeline | None = None,
        claim: Callable[[], bool] | None = None,
        recorder: Recorder | None = None,
        known: KnownRows | None = None,
        settle: Callable[[bool], bool] | None = None,
        wake: Callable[[], object] | None = None,
        dense: DenseExecutor | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self.store = store
        self.optimizer = optimizer
        self.prepare = prepare
        self.settings = settings
        self.trace = trace
        self.on_batch = on_batch
        self.peers = peers
        self.pipeline = pipeline
        self.claim = claim if claim is not None else store.claim
        self.recorder = recorder
        if recorder is not None:
            recorder.bind(self)
        self.known = known
        self.settle = settle
        self.wake = wake
        self.dense: DenseExecutor = dense if dense is not None else EagerExecutor(model)
        #: Of the phase under way.
        self.runner: Runner | None = None

    def abort(self, error: BaseException) -> None:
        """End the phase under way, if there is one, with this error. From any thread."""
        runner = self.runner
        if runner is not None:
            runner.abort(error)

    def train(
        self, batches: Iterator[RankBatch], *, first_batch: int = 0, carried: Mapping[str, Any] | None = None
    ) -> PhaseResult:
        """Train on the batches and write every updated row back; then the recorder's last checkpoint.

        On SIGINT or SIGTERM the batches already read are finished and written back (`PhaseResult.report.stopped`).

        Args:
            batches: what to train on.
            first_batch: number of the first of them; the batches before are trained already. Model, optimizers, random
                state and store are as they were then.
            carried: this rank's `Part.progress` of the checkpoint that is resumed from: samples, losses and skipped
                batches go on from there, so that `PhaseResult.progress` counts the whole job (rows and times: this
                process).

        Raises:
            StoreError: the store failed; rows not acknowledged are still dirty in the cache.
            LostRowError: a row that was written is not in the store. Nothing was trained on its loss.
            JobError: a checkpoint could not be written, or a loss or gradient is not finite.
        """
        self.model.train()
        phase = _TRAINING[self.pipeline is not None, self.peers is not None]
        result = phase(self, batches, first_batch=first_batch, carried=carried or {}).run()
        self.cache.clear()
        if self.pipeline is not None:
            self.pipeline.adopt(self.optimizer)
        return result

    def evaluate(self, batches: Iterator[RankBatch], on_scores: Callable[[Tensor, Tensor], None]) -> PhaseResult:
        """Score the batches; changes neither model nor rows nor store.

        Args:
            batches: what to score.
            on_scores: called with logits and labels ``[num_examples]`` of every batch, on the host, in order: in the
                compute lane when they have come there, the last ones by the caller.
        """
        self.model.eval()
        phase = Evaluation if self.peers is None else EvaluationOfRanks
        result = phase(self, batches, on_scores).run()
        self.cache.clear()
        return result
