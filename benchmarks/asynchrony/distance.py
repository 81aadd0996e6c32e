"""Distance of predicted weights from the actual ones, beside that of the stale weights that they start from.

before OPT of batch b the parameters are version b:      stale    version b - gap
                                                         actual   version b + ahead, once it exists
                                                         predicted from the stale one, as the forward of b had it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from bagpipe.config.load import parse_config
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.part import Hook, LoopPart
from bagpipe.training.staged_dense import StagedDense
from benchmarks.asynchrony.quality import Run, flags_of
from cacher.planning import PlannedData
from trainer.assembly import build_dense, build_engine, build_training_model

__all__ = ["OPTIMIZERS", "Distance", "measure_distances"]

OPTIMIZERS: Mapping[str, list[str]] = {
    "SGD, momentum 0.9": ["--optim.dense", "sgd", "--optim.momentum", "0.9", "--optim.dense_lr", "0.02"],
    "Adam": ["--optim.dense", "adam", "--optim.dense_lr", "0.002"],
    "AdamW, decay 0.1": ["--optim.dense", "adamw", "--optim.dense_lr", "0.002", "--optim.weight_decay", "0.1"],
    "Adagrad": ["--optim.dense", "adagrad", "--optim.dense_lr", "0.02"],
}
#: Batches at the beginning that do not count: gaps are shorter, and moments are young.
_WARM_UP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Distances of one stage.

    Attributes:
        stage: number.
        steps: of the prediction.
        stale: median over the batches of ``||stale - actual|| / ||actual||``.
        ratio: median of ``||predicted - actual|| / ||stale - actual||``; below 1 the prediction helps.
    """

    stage: int
    steps: int
    stale: float
    ratio: float


@dataclass(slots=True)
class _Stage:
    versions: dict[int, Tensor] = field(default_factory=dict)
    predicted: dict[int, Tensor] = field(default_factory=dict)
    stale: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


class _Distances(LoopPart):
    """Compares the weights of each batch, before its step."""

    name = "distances"

    def __init__(self, dense: StagedDense) -> None:
        self._dense = dense
        self.stages: dict[int, _Stage] = {}

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.STEP, when="before", call=self._note)

    def _note(self, key: OpKey, b: int) -> None:
        chunk = self._dense.chunk_of(key)
        if chunk is None or not chunk.parameters:
            return
        stage = int(chunk.name)
        lags = self._dense.pipeline.step.version_lags[stage]
        if not lags.predicts_forward:
            return
        kept = self.stages.setdefault(stage, _Stage())
        kept.versions[b] = _flat([parameter for _, parameter in chunk.parameters])
        weights = self._dense.pipeline.versions[stage].weights("forward", b)
        assert weights is not None, "predicted"
        kept.predicted[b] = _flat(weights)
        ready = b + lags.forward  # the batch whose forward stands for version b
        predicted, stale = kept.predicted.pop(ready, None), kept.versions.get(ready - lags.forward_base)
        if predicted is not None and stale is not None and ready >= _WARM_UP:
            actual = kept.versions[b]
            distance = float((stale - actual).norm())
            kept.stale.append(distance / float(actual.norm()))
            kept.ratios.append(float((predicted - actual).norm()) / distance if distance else math.nan)
        oldest = b - max(lags.forward_base, 0) + min(lags.forward, 0)
        kept.versions = {n: version for n, version in kept.versions.items() if n >= oldest}


def measure_distances(run: Run, optimizer: str, path: str, examples: int) -> list[Distance]:
    """Train by a schedule that predicts.

    Args:
        run: the job.
        optimizer: of `OPTIMIZERS`.
        path: Criteo's click logs.
        examples: how many are used.
    """
    data = ["--data.path", path, "--data.format", "criteo-tsv", "--data.limit", str(examples)]
    config = parse_config([*flags_of(run, data), *OPTIMIZERS[optimizer]], "asynchrony", ()).config
    torch.set_num_threads(1)
    source = PlannedData(config.data, config.run.seed)
    built = build_training_model(config, source.schema)
    dense = build_dense(built)
    assert isinstance(dense, StagedDense), "in stages"
    distances = _Distances(dense)
    with MemoryStore(built.rows) as store:
        engine = build_engine(built, store, dense=dense, parts=(distances,))
        with closing(source.batches("train", built.spec)) as batches:
            engine.train(batches)
    lags = dense.pipeline.step.version_lags
    return [
        Distance(
            stage=stage,
            steps=lags[stage].forward_base - lags[stage].forward,
            stale=median(kept.stale),
            ratio=median(kept.ratios),
        )
        for stage, kept in sorted(distances.stages.items())
    ]


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])
