"""A complete training job in one process, without torchrec, servers or a cacher: oracle, engine, DLRM and a store.

    batches ──plan_rank_batches──> rank batches ──PlainJob.train──> digests, losses, totals ──score──> logits, labels

For tests and measurements on machines with few packages. All parts except the model are the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from bagpipe.cache.row_cache import RowCache
from bagpipe.dense.executor import DenseExecutor, EagerExecutor
from bagpipe.embedding.plain_bags import CachedBags, PlainInputs
from bagpipe.embedding.table_dtypes import RowDtypes
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.select import select_kernels
from bagpipe.models.plain_dlrm import PlainDLRM
from bagpipe.optim import RowOptimizers
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.dense import DensePart
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.engine import Engine, EngineSettings, OnBatch
from bagpipe.training.progress import RunResult
from bagpipe.training.row_steps import row_steps_of
from bagpipe.training.weights import GradientSum, ResidentWeights
from bagpipe.training.whole_dense import WholeDense
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, RowSchema

__all__ = ["PlainJob", "PlainSettings", "plan_rank_batches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings:
    """Settings of a job.

    Attributes:
        schema: data schema.
        device: torch device name.
        cache_rows: cache size per rank; 0: direct mode.
        grows: the cache grows up to `cache_rows`, see `OracleSpec.grows`.
        lookahead, prefetch_depth, read_ahead: numbers of batches.
        dim: embedding dimension of tables that name none.
        bottom_mlp, top_mlp: layer widths of the model.
        rows, rows_lr, eps: row optimizer of all tables. The dense optimizer is SGD with `dense_lr`.
        optimizers: row optimizers by table name, in place of `rows`, `rows_lr` and `eps`.
        dtype: of the computation.
        row_dtype: of row weights, as cache.dtype, or by table name, else float32. Half rows are rounded stochastically.
        kernels: as run.kernels.
        seed: of the initial values of dense parameters and rows.
    """

    schema: DataSchema
    device: str = "cpu"
    cache_rows: int = 0
    grows: bool = False
    lookahead: int = 8
    prefetch_depth: int = 4
    read_ahead: int = 8
    dim: int = 8
    bottom_mlp: tuple[int, ...] = (16,)
    top_mlp: tuple[int, ...] = (16,)
    rows: str = "sgd"
    rows_lr: float = 0.1
    eps: float = 1e-8
    optimizers: RowOptimizers | None = None
    dense_lr: float = 0.1
    dtype: str = "float32"
    row_dtype: RowDtypes = "run"
    kernels: str = "auto"
    seed: int = 0


def plan_rank_batches(batches: Iterable[Batch], spec: OracleSpec) -> Iterator[RankBatch]:
    """Batches of one rank, planned lazily; `spec.lookahead` batches are read ahead.

    Raises:
        CapacityError: a batch does not fit the cache.
    """
    for batch, plan in plan_batches(batches, spec):
        yield RankBatch.of(batch, plan, 0)


class PlainJob:
    """A model, its cache and its engine. Context manager: opens and closes the store.

    Args:
        settings: settings of the job.
        make_store: opens a store for the row schema; default: in memory.
        trace: records every action.
        on_batch: see `Engine.train`.

    Attributes:
        spec: oracle spec for planning the batches.
        rows: row schema.
        store, cache, model: parts of the job.
        engine: trains the model; can be replaced by another `make_engine` before `train`.
    """

    def __init__(
        self,
        settings: PlainSettings,
        *,
        make_store: Callable[[RowSchema], Store] = MemoryStore,
        trace: Trace | None = None,
        on_batch: OnBatch | None = None,
    ) -> None:
        device = torch.device(settings.device)
        torch.manual_seed(settings.seed)
        row_dtype = settings.dtype if settings.row_dtype == "run" else settings.row_dtype
        by_table = None if isinstance(row_dtype, str) else row_dtype
        bags = CachedBags(settings.schema, settings.dim, settings.optimizers, by_table)
        model = PlainDLRM(
            bags,
            num_dense=max(1, len(settings.schema.dense)),
            num_features=len(settings.schema.features),
            dim=settings.dim,
            bottom_mlp=settings.bottom_mlp,
            top_mlp=settings.top_mlp,
        )
        # Created on the host and moved, so that initial values are the same on every device.
        self.model = model.to(device, TORCH_DTYPE[settings.dtype])
        rows = RowSchema(
            tables=bags.row_tables,
            optimizer=settings.rows if bags.optimizer is None else bags.optimizer,
            dtype=row_dtype if isinstance(row_dtype, str) else bags.dtype or "float32",
            seed=settings.seed,
        )
        self.rows = replace(rows, rounding="stochastic") if rows.has_half_rows else rows
        self.spec = bags.spec(num_slots=settings.cache_rows, lookahead=settings.lookahead, grows=settings.grows)
        self.cache = RowCache(
            self.rows,
            self.spec.slots_per_rank,
            device,
            prefetch_depth=settings.prefetch_depth,
            kernels=select_kernels(self.rows, device, settings.kernels),
            grows=settings.grows,
        )
        bags.bind(self.cache)
        self.store = make_store(self.rows)
        self._settings = settings
        self._layout = bags.layout
        self._row_steps = row_steps_of(bags.layout, bags.optimizers) if bags.optimizers else None
        self._trace = trace
        self._on_batch = on_batch
        self.engine = self.make_engine()

    def make_dense(
        self,
        *,
        optimizer: Optimizer | None = None,
        executor: DenseExecutor | None = None,
        replicas: GradientSum | None = None,
    ) -> DensePart:
        """A dense part over the model of this job.

        Args:
            optimizer: default: SGD with `dense_lr`.
            executor: default: eager.
            replicas: sums gradients over ranks.
        """
        if optimizer is None:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=self._settings.dense_lr)
        executor = EagerExecutor(self.model) if executor is None else executor
        return WholeDense(weights=ResidentWeights(self.model, optimizer, replicas), executor=executor)

    def make_engine(self, dense: DensePart | None = None, **more: Any) -> Engine:
        """An engine over the parts of this job; `more` as in `Engine`."""
        settings = self._settings
        return Engine(
            layout=self._layout,
            cache=self.cache,
            store=self.store,
            dense=self.make_dense() if dense is None else dense,
            prepare=PlainInputs(settings.schema),
            settings=EngineSettings(
                prefetch_depth=settings.prefetch_depth,
                read_ahead=settings.read_ahead,
                rows_lr=settings.rows_lr,
                eps=settings.eps,
            ),
            row_steps=self._row_steps,
            trace=self._trace,
            **more,
        )

    def __enter__(self) -> Self:
        self.store.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.__exit__(kind, error, trace)

    def train(self, batches: Iterable[Batch]) -> RunResult:
        """Plan and train the batches. Afterwards all rows are in the store."""
        return self.engine.train(plan_rank_batches(batches, self.spec), on_batch=self._on_batch)

    def score(self, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        """Logits and labels ``[num_examples]`` of the batches, on the host."""
        scores: list[tuple[Tensor, Tensor]] = []
        self.engine.evaluate(
            plan_rank_batches(batches, self.spec), lambda logits, labels: scores.append((logits.cpu(), labels.cpu()))
        )
        logits, labels = zip(*scores, strict=True)
        return torch.cat(logits), torch.cat(labels)

    def digests(self) -> tuple[str, str]:
        """Digests of the dense part and of the rows in the store, after `train`."""
        return dense_digest(self.model, self.engine.dense.optimizer), embedding_digest(self.store)
