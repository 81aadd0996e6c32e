"""Whole jobs in this process: from a configuration to losses, rows, dense parameters and AUC."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config
from bagpipe.oracle.rank_batch import BatchSource
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from bagpipe.training.dense import DensePart
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.progress import Progress, RunResult
from cacher.embedded import EmbeddedCacher
from cacher.planning import PlannedData
from trainer.assembly import BuiltModel, build_engine, build_training_model
from trainer.metrics import BinaryMetrics
from trainer.tasks import Tasks

__all__ = ["JobOutcome", "change", "largest_batch", "run_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Final numbers of a job.

    Attributes:
        losses: mean loss of every batch.
        norms: of every batch's gradients before their limit; empty without one.
        rows: per table name, ids in ascending order and their records.
        dense, state: parameters by name; dense optimizer state by parameter number and name.
        auc: on the held-out examples.
    """

    dense_digest: str
    embedding_digest: str
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rows: dict[str, tuple[NDArray[np.int64], NDArray[Any]]]
    dense: dict[str, torch.Tensor]
    state: dict[int, dict[str, Any]]
    trained: RunResult
    built: BuiltModel
    auc: float | None = None
    ne: float | None = None

    @property
    def digests(self) -> tuple[str, str]:
        return self.dense_digest, self.embedding_digest


@dataclass(slots=True)
class _Losses:
    """`Engine.on_batch` that records every batch's mean loss, and the norm of its gradients where it is limited."""

    dense: DensePart
    sums: list[float] = field(default_factory=lambda: [0.0])
    samples: list[int] = field(default_factory=lambda: [0])
    norms: list[float] = field(default_factory=list)

    def __call__(self, totals: Callable[[], Progress]) -> None:
        progress = totals()
        self.sums.append(float(progress.loss_sum))
        self.samples.append(progress.samples)
        if self.dense.gradient_norm is not None:
            self.norms.append(float(self.dense.gradient_norm))

    def means(self) -> tuple[float, ...]:
        return tuple((np.diff(self.sums) / np.diff(self.samples)).tolist())


def change(config: Config, **values: object) -> Config:
    """`config` with changed keys: ``change(config, cache__rows=7)``."""
    for path, value in values.items():
        section, _, name = path.partition("__")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


def run_job(
    config: Config,
    *,
    transport: str = "in-process",
    wrap: Callable[[Store], Store] | None = None,
    trace: Trace | None = None,
) -> JobOutcome:
    """Train, and evaluate if the configuration holds examples out.

    Args:
        config: the job; its `store.url` is used unchanged (``memory://`` for a store of this job alone).
        transport: ``in-process``, or ``process``: an embedded cacher.
        wrap: wraps the store given to the engine.
        trace: records the actions.
    """
    torch.set_num_threads(config.run.threads)
    with ExitStack() as stack:
        source: BatchSource
        if transport == "process":
            credits = config.cache.read_ahead
            cacher = stack.enter_context(EmbeddedCacher(config))
            source = stack.enter_context(RemoteBatches(cacher.url, config, credits=credits))
        else:
            source = PlannedData(config.data, config.run.seed)
        built = build_training_model(config, source.schema)
        store = stack.enter_context(
            open_store(
                config.store.url,
                namespace=config.store.namespace,
                schema=built.rows,
                buckets=config.store.buckets,
                timeout_s=config.store.timeout_s,
            )
        )
        store.check()
        engine = build_engine(built, store if wrap is None else wrap(store), trace=trace)
        losses = _Losses(engine.dense)
        # The caller closes the batches: a job that fails leaves them half read.
        with closing(source.batches("train", built.spec, max_steps=config.run.steps)) as batches:  # type: ignore[type-var] # both sources' are generators
            trained = engine.train(batches, on_batch=losses)
        metrics = BinaryMetrics(tasks=Tasks.of(built.data))
        if config.data.eval_fraction:
            engine.evaluate(source.batches("eval", built.spec), metrics.add, loss=Tasks.of(built.data).loss)
        quality = metrics.quality()
        return JobOutcome(
            dense_digest=dense_digest(engine.dense.model, engine.dense.optimizer),
            embedding_digest=embedding_digest(store),
            losses=losses.means(),
            norms=tuple(losses.norms),
            rows=dict(_rows(store)),
            dense={name: value.detach().clone() for name, value in engine.dense.model.state_dict().items()},
            state=engine.dense.optimizer.state_dict()["state"],
            trained=trained,
            built=built,
            auc=quality.auc,
            ne=quality.ne,
        )


def _rows(store: Store) -> Iterator[tuple[str, tuple[NDArray[np.int64], NDArray[Any]]]]:
    for number, table in enumerate(store.schema.tables):
        ids = store.ids(number)
        yield table.name, (ids, store.read(number, ids).rows.copy())


def largest_batch(config: Config) -> int:
    """Most unique rows of any batch: the smallest cache that works."""
    source = PlannedData(config.data, config.run.seed)
    spec = dataclasses.replace(build_training_model(config, source.schema).spec, num_slots=0)
    phases = ("train", "eval") if config.data.eval_fraction else ("train",)
    return max(len(rank_batch.consumer.unique) for phase in phases for rank_batch in source.batches(phase, spec))  # type: ignore[arg-type]
